//! Arithmetic with one fixed order of operations.
//!
//! Invariant: each function here returns the same bits for the same inputs on every IEEE-754
//! machine, whatever its SIMD width. It holds because sums run in a fixed number of lanes
//! ([`LANES`]) that are folded in a fixed tree, because Rust never contracts `a * b + c` into a
//! fused operation, and because nothing calls the platform's libm. A change of [`LANES`] or of an
//! order changes bits: it must change the engine's numerics profile too.

mod blocks;
mod elementary;
mod kernels;
mod matrix;
mod narrow;

pub(crate) use blocks::BlockKind;
pub(crate) use elementary::{exp64, ln64, sin_cos64};
pub(crate) use kernels::{LANES, add_assign, rms_norm, silu_mul, softmax_in_place};
pub(crate) use matrix::{Matrix, Threads, with_simd};
pub(crate) use narrow::{decode_row, encode_row, round_row};
