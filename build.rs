//! Compiles the control RPC (no protoc needed).
fn main() {}
