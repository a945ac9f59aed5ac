//! Compiles the control RPC's protos in pure Rust: no protoc on the machine is needed. A build
//! without the feature `program` has no RPC and compiles nothing here.

fn main() {
    println!("cargo:rerun-if-changed=proto");
    #[cfg(feature = "program")]
    protos();
}

#[cfg(feature = "program")]
fn protos() {
    const FILES: [&str; 5] = [
        "moonlive/engine/v1/adapter.proto",
        "moonlive/v1/common.proto",
        "moonlive/v1/worker.proto",
        "moonlive/v1/coordinator.proto",
        "moonlive/v1/gateway.proto",
    ];
    let set = protox::compile(FILES, ["proto"]).expect("the protos under proto/ must compile");
    tonic_prost_build::configure()
        .compile_fds(set)
        .expect("code for the protos under proto/ must be written to OUT_DIR");
}
