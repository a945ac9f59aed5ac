//! A real directory, locked against a second process.

use super::dir::{Dir, File};
use super::direct::Direct;
use super::error::{IoError, WalError};
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// A directory of this machine. Holds `LOCK` in it with `flock(2)`, which ends with the process,
/// however that ends.
#[derive(Debug)]
pub struct DiskDir {
    path: PathBuf,
    fd: OwnedFd,
    /// What [`Dir::wake`] writes to; made at its first call.
    awake: OnceLock<Arc<dyn File>>,
    /// Small writes go past the page cache.
    direct: bool,
    _lock: OwnedFd,
}

/// The file behind [`Dir::wake`]; nothing reads it.
const AWAKE: &str = "awake";
const AWAKE_BYTES: usize = 512;

/// Zero-fill is written in pieces of this size.
const FILL: usize = 1 << 20;

fn err(op: &'static str, name: impl Into<String>, e: Errno) -> IoError {
    IoError {
        op,
        name: name.into(),
        errno: e.raw_os_error(),
    }
}

impl DiskDir {
    /// Opens the directory, making it (readable by its owner only) and its parents where needed.
    pub fn open(path: impl AsRef<Path>) -> Result<Arc<Self>, WalError> {
        Self::open_with(path, false)
    }

    /// [`open`](Self::open) for a log whose every small write is flushed at once, with somebody
    /// waiting: those writes go past the page cache, where the file system has a way. One writer a
    /// file.
    pub fn open_direct(path: impl AsRef<Path>) -> Result<Arc<Self>, WalError> {
        Self::open_with(path, true)
    }

    fn open_with(path: impl AsRef<Path>, direct: bool) -> Result<Arc<Self>, WalError> {
        let path = path.as_ref().to_path_buf();
        let shown = path.display().to_string();
        let made = !path.is_dir();
        if made {
            use std::os::unix::fs::DirBuilderExt;
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&path)
                .map_err(|e| io("mkdir", &shown, &e))?;
        }
        // The directory's own name must survive a power loss too. Also when it was there: whoever
        // made it may have died right behind that.
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        let synced = std::fs::File::open(parent).and_then(|dir| dir.sync_all());
        if let Err(e) = synced
            && (made || e.kind() != std::io::ErrorKind::PermissionDenied)
        {
            return Err(io("fsync", &parent.display().to_string(), &e).into());
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd =
            rustix::fs::open(&path, flags, Mode::empty()).map_err(|e| err("open", &shown, e))?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let lock = rustix::fs::openat(&fd, "LOCK", flags, Mode::from_raw_mode(0o600))
            .map_err(|e| err("open", "LOCK", e))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => return Err(WalError::Locked { dir: shown }),
            other => other.map_err(|e| err("flock", "LOCK", e))?,
        }
        Ok(Arc::new(Self {
            path,
            fd,
            awake: OnceLock::new(),
            direct,
            _lock: lock,
        }))
    }

    /// `zeros`: from there on the file holds nothing but zeros.
    fn file(&self, name: &str, fd: OwnedFd, zeros: u64) -> DiskFile {
        let direct = self
            .direct
            .then(|| Direct::open(&self.fd, name, zeros))
            .flatten();
        DiskFile {
            name: name.to_owned(),
            fd,
            direct: direct.map(Mutex::new),
        }
    }

    fn fill(&self, name: &str, fd: &OwnedFd, len: u64) -> Result<(), IoError> {
        match rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, len) {
            // Writing the zeros allocates as well.
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            Err(e) => return Err(err("fallocate", name, e)),
        }
        // Allocated blocks count as unwritten until written once: converting them costs a journal
        // commit, which would then be paid by the first flush that touches each.
        let zeros = vec![0u8; FILL.min(len as usize)];
        let mut at = 0;
        while at < len {
            let piece = &zeros[..zeros.len().min((len - at) as usize)];
            write_all(name, fd, at, piece)?;
            at += piece.len() as u64;
        }
        rustix::fs::fsync(fd).map_err(|e| err("fsync", name, e))
    }
}

fn io(op: &'static str, name: &str, e: &std::io::Error) -> IoError {
    IoError {
        op,
        name: name.to_owned(),
        errno: e.raw_os_error().unwrap_or(0),
    }
}

fn write_all(name: &str, fd: &OwnedFd, mut at: u64, mut bytes: &[u8]) -> Result<(), IoError> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(fd, bytes, at) {
            // A regular file takes nothing only where it cannot grow.
            Ok(0) => return Err(err("pwrite", name, Errno::NOSPC)),
            Ok(n) => {
                at += n as u64;
                bytes = &bytes[n..];
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(err("pwrite", name, e)),
        }
    }
    Ok(())
}

impl Dir for DiskDir {
    fn create(&self, name: &str, len: u64) -> Result<Arc<dyn File>, IoError> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&self.fd, name, flags, Mode::from_raw_mode(0o600))
            .map_err(|e| err("create", name, e))?;
        if let Err(e) = self.fill(name, &fd, len) {
            let _ = self.remove(name);
            return Err(e);
        }
        // Zeros all over, and known to be.
        Ok(Arc::new(self.file(name, fd, 0)))
    }

    fn open(&self, name: &str) -> Result<Arc<dyn File>, IoError> {
        let fd = rustix::fs::openat(
            &self.fd,
            name,
            OFlags::RDWR | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(|e| err("open", name, e))?;
        Ok(Arc::new(self.file(name, fd, u64::MAX)))
    }

    fn list(&self) -> Result<Vec<String>, IoError> {
        let shown = self.name();
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(|e| io("readdir", &shown, &e))? {
            let entry = entry.map_err(|e| io("readdir", &shown, &e))?;
            names.extend(entry.file_name().into_string());
        }
        names.sort();
        Ok(names)
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), IoError> {
        rustix::fs::renameat(&self.fd, from, &self.fd, to).map_err(|e| err("rename", from, e))
    }

    fn remove(&self, name: &str) -> Result<(), IoError> {
        rustix::fs::unlinkat(&self.fd, name, rustix::fs::AtFlags::empty())
            .map_err(|e| err("unlink", name, e))
    }

    fn sync(&self) -> Result<(), IoError> {
        rustix::fs::fsync(&self.fd).map_err(|e| err("fsync", self.name(), e))
    }

    fn wake(&self) -> Result<(), IoError> {
        let file = match self.awake.get() {
            Some(file) => file,
            None => {
                let file = match self.open(AWAKE) {
                    Ok(file) => file,
                    Err(_) => self.create(AWAKE, AWAKE_BYTES as u64)?,
                };
                self.awake.get_or_init(|| file)
            }
        };
        // In place, and of one length always: no block is allocated and no size changes, so the
        // flush has nothing but this one write to wait for.
        file.write_at(0, &[0; AWAKE_BYTES])?;
        file.sync()
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }
}

struct DiskFile {
    name: String,
    fd: OwnedFd,
    direct: Option<Mutex<Direct>>,
}

impl std::fmt::Debug for DiskFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DiskFile({})", self.name)
    }
}

impl DiskFile {
    /// Reads into `out` from `at` on; less than all of it only at the file's end.
    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<usize, IoError> {
        let mut done = 0;
        while done < out.len() {
            match rustix::io::pread(&self.fd, &mut out[done..], at + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(e) => return Err(err("pread", &self.name, e)),
            }
        }
        Ok(done)
    }
}

impl File for DiskFile {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
        if let Some(direct) = &self.direct {
            let read = |at: u64, out: &mut [u8]| self.read_at(at, out);
            let fail = |e| err("pwrite", &self.name, e);
            if direct.lock().write(offset, bytes, read, fail)? {
                return Ok(());
            }
        }
        write_all(&self.name, &self.fd, offset, bytes)
    }

    fn sync(&self) -> Result<(), IoError> {
        rustix::fs::fdatasync(&self.fd).map_err(|e| err("fdatasync", &self.name, e))
    }

    fn read(&self) -> Result<Vec<u8>, IoError> {
        let len = rustix::fs::fstat(&self.fd)
            .map_err(|e| err("fstat", &self.name, e))?
            .st_size;
        let mut bytes = vec![0u8; len as usize];
        let read = self.read_at(0, &mut bytes)?;
        bytes.truncate(read);
        Ok(bytes)
    }

    fn name(&self) -> String {
        self.name.clone()
    }
}
