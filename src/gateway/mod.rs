//! The gateway: accepts tokens and streams them to clients.

pub mod http;
pub mod hub;
pub mod openai;
