//! The control RPC.
