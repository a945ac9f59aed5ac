//! What an operator chose for one migration; travels with the protocol's `Prepare` and inside the
//! import specification. None of it carries authority.

use crate::migrate::limits::Limits;
use crate::route::{DecodeError, Reader, Writer};
use crate::transport::Path;

/// Every path, in the order of its wire tag.
pub const PATHS: [Path; 3] = [Path::Local, Path::Shm, Path::Tcp];

/// Reads a path's name.
pub fn path_from(name: &str) -> Option<Path> {
    PATHS.into_iter().find(|p| p.name() == name)
}

/// The choices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Path of the bulk.
    pub path: Path,
    /// Re-hash everything inside the fence, at both ends.
    pub verify_full: bool,
    /// Bound of STREAM in bytes per second; 0 = none.
    pub max_bytes_per_s: u64,
    /// No payload and no hash in the fence, and no request afterwards; see [`super::worker::null`].
    pub null_handoff: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            path: Path::Tcp,
            verify_full: false,
            max_bytes_per_s: 0,
            null_handoff: false,
        }
    }
}

impl Options {
    /// Appends the fields.
    pub fn put(&self, w: &mut Writer) {
        let tag = PATHS.iter().position(|p| *p == self.path).unwrap_or(0);
        w.u8(tag as u8);
        w.u8(self.verify_full.into());
        w.u64(self.max_bytes_per_s);
        w.u8(self.null_handoff.into());
    }

    /// Reads the fields.
    pub fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let path = usize::from(r.u8("options.path")?);
        Ok(Self {
            path: *PATHS.get(path).ok_or(DecodeError::Range("options.path"))?,
            verify_full: r.flag("options.verify_full")?,
            max_bytes_per_s: r.u64("options.max_bytes_per_s")?,
            null_handoff: r.flag("options.null_handoff")?,
        })
    }

    /// The bytes that go with `Prepare`.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        self.put(&mut w);
        w.0
    }

    /// Reads the bytes that came with `Prepare`.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes);
        let options = Self::get(&mut r)?;
        r.end()?;
        Ok(options)
    }

    /// The machines' limits under these choices.
    pub fn limits(&self, base: &Limits) -> Limits {
        let mut limits = base.clone();
        limits.verify_full |= self.verify_full;
        if self.max_bytes_per_s > 0 {
            limits.stream_bytes_per_s = self.max_bytes_per_s;
            // Five milliseconds' worth may go at once: what is saved up goes at full speed, and that
            // is what the neighbours are to be spared.
            limits.stream_burst_bytes = (self.max_bytes_per_s / 200).max(1 << 20);
        }
        limits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_survive_their_bytes() {
        for path in PATHS {
            let o = Options {
                path,
                verify_full: true,
                max_bytes_per_s: 7,
                null_handoff: path == Path::Tcp,
            };
            assert_eq!(Options::decode(&o.encode()), Ok(o));
            assert_eq!(path_from(path.name()), Some(path));
        }
        assert!(Options::decode(&[9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).is_err());
    }
}
