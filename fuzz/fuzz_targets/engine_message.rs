#![no_main]

#[path = "../decoders/mod.rs"]
mod decoders;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    decoders::run("engine_message", data);
});
