//! The C ABI.

/// The version of the C ABI, `major << 16 | minor`; a caller checks the major part before use.
// SAFETY: the symbol is prefixed with the library's name, so it does not clash with another one.
#[unsafe(no_mangle)]
pub extern "C" fn moonlivekv_abi_version() -> u32 {
    1
}
