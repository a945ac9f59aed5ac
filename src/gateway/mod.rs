//! The gateway: accepts tokens and streams them to clients.
