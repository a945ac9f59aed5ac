//! Worker and coordinator: execute the protocol's actions.
