//! The command line of MoonLiveKV.
fn main() {}
