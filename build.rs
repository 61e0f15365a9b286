//! Compiles `proto/` with protox, so that no `protoc` is needed on the machine.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["proto/trainer.proto", "proto/control.proto"];
    for file in files {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
