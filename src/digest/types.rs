//! Digest values: 256 bits each, of three kinds that cannot be mixed up.

use std::fmt;

macro_rules! digest {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        pub struct $name(pub [u8; 32]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }
    };
}

digest! {
    /// Digest of one leaf: the valid tokens of one page, one layer, one head.
    LeafDigest
}
digest! {
    /// Digest of one page of one group: geometry, valid tokens and leaves, not its place in the
    /// request.
    PageDigest
}
digest! {
    /// Digest of an object set: header, order and token ranges of all pages, and their digests.
    SetDigest
}

impl PageDigest {
    /// The 128 bits that `PageRef` keeps. Nothing else truncates.
    pub fn short(&self) -> [u8; 16] {
        let mut out = [0; 16];
        out.copy_from_slice(&self.0[..16]);
        out
    }
}
