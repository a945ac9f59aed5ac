//! Stands in for `simd` on targets without AVX-512: never detected, so never called.

use std::convert::Infallible;

use super::lanes::LANES;

pub(super) const BLOCK: usize = 64;

#[derive(Clone, Copy)]
pub(super) struct Avx512(Infallible);

#[derive(Clone, Copy)]
pub(super) struct Values(Infallible);

#[derive(Clone, Copy)]
pub(super) struct Words(Infallible);

pub(super) type Row<'m> = &'m [[u8; BLOCK]];

impl Avx512 {
    pub(super) fn detect(_key: [u32; 8]) -> Option<Self> {
        None
    }

    pub(super) fn start(&self) -> Values {
        match self.0 {}
    }

    pub(super) fn load(&self, _rows: &[Row<'_>; LANES]) -> Words {
        match self.0 {}
    }

    pub(super) fn rows(
        &self,
        _state: (&mut Values, &mut Words),
        _rows: &[Row<'_>; LANES],
        _soon: &[Row<'_>; LANES],
        _chunk: (u32, usize),
        _end: u8,
    ) {
        match self.0 {}
    }

    pub(super) fn parents(&self, _left: &Values, _right: &mut Values, _root: bool) {
        match self.0 {}
    }
}

impl Values {
    pub(super) fn digests(&self) -> [[u8; 32]; LANES] {
        match self.0 {}
    }
}
