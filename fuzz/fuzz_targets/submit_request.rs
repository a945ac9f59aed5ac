#![no_main]

#[path = "../decoders/mod.rs"]
mod decoders;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    decoders::run("submit_request", data);
});
