//! The migration protocol as sans-IO state machines.
