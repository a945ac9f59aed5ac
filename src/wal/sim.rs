//! A disk in memory that fails and forgets as a test asks. It keeps apart what a process sees (the
//! page cache) from what a power loss leaves, and records every operation, so that a log can be
//! re-opened as it would be found after a crash at any point.

use super::dir::{Dir, File};
use super::error::IoError;
use super::record::SECTOR;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// One operation, as recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SimOp {
    /// A zero-filled file.
    Create {
        /// Its name.
        name: String,
        /// Its number, which renaming does not change.
        file: usize,
        /// Its size.
        len: usize,
    },
    /// A write.
    Write {
        /// The file's number.
        file: usize,
        /// Where.
        offset: usize,
        /// What.
        bytes: Vec<u8>,
    },
    /// A flush.
    Sync {
        /// The file's number.
        file: usize,
        /// Whether it was made to fail: then what was dirty is clean but not on the disk, as Linux
        /// has it.
        failed: bool,
    },
    /// A rename.
    Rename {
        /// Old name.
        from: String,
        /// New name.
        to: String,
    },
    /// A removal.
    Remove {
        /// The name.
        name: String,
    },
    /// A flush of the names.
    SyncDir,
}

/// What a test makes of an operation about to happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It happens.
    None,
    /// It fails with that errno and changes nothing (a flush loses what it should have written).
    Fail(i32),
    /// A write stores that many bytes, then fails with `EIO`.
    Cut(usize),
}

type Hook = Box<dyn FnMut(&SimOp) -> Fault + Send>;

#[derive(Default)]
struct State {
    /// Before the first operation of the trace.
    base: Model,
    disk: Model,
    trace: Vec<SimOp>,
    hook: Option<Hook>,
}

/// Contents twice over: as seen, and as a power loss leaves them.
#[derive(Clone, Default)]
struct Model {
    names: BTreeMap<String, usize>,
    names_durable: BTreeMap<String, usize>,
    names_pending: Vec<SimOp>,
    seen: Vec<Vec<u8>>,
    durable: Vec<Vec<u8>>,
    dirty: Vec<BTreeSet<usize>>,
}

impl Model {
    fn apply(&mut self, op: &SimOp) {
        match op {
            SimOp::Create { len, .. } => {
                self.seen.push(vec![0; *len]);
                self.durable.push(vec![0; *len]);
                self.dirty.push(BTreeSet::new());
            }
            SimOp::Write {
                file,
                offset,
                bytes,
            } => {
                let end = offset + bytes.len();
                if self.seen[*file].len() < end {
                    self.seen[*file].resize(end, 0);
                    self.durable[*file].resize(end, 0);
                }
                self.seen[*file][*offset..end].copy_from_slice(bytes);
                if !bytes.is_empty() {
                    self.dirty[*file].extend(offset / SECTOR..=(end - 1) / SECTOR);
                }
            }
            SimOp::Sync { file, failed } => {
                for sector in std::mem::take(&mut self.dirty[*file]) {
                    if !failed {
                        self.keep_sector(*file, sector);
                    }
                }
            }
            SimOp::SyncDir => {
                self.names_pending.clear();
                self.names_durable = self.names.clone();
            }
            SimOp::Rename { .. } | SimOp::Remove { .. } => {}
        }
        if matches!(
            op,
            SimOp::Create { .. } | SimOp::Rename { .. } | SimOp::Remove { .. }
        ) {
            rename(&mut self.names, op);
            self.names_pending.push(op.clone());
        }
    }

    fn keep_sector(&mut self, file: usize, sector: usize) {
        let end = ((sector + 1) * SECTOR).min(self.seen[file].len());
        let range = sector * SECTOR..end;
        let (seen, durable) = (&self.seen[file], &mut self.durable[file]);
        durable[range.clone()].copy_from_slice(&seen[range]);
    }

    /// What the machine finds after losing power now; `keep` decides for each dirty sector, and for
    /// each pending change of names in order (the first one lost loses those after it).
    fn power_loss(mut self, keep: &mut dyn FnMut() -> bool) -> Self {
        for file in 0..self.dirty.len() {
            for sector in std::mem::take(&mut self.dirty[file]) {
                if keep() {
                    self.keep_sector(file, sector);
                }
            }
        }
        for op in std::mem::take(&mut self.names_pending) {
            if !keep() {
                break;
            }
            rename(&mut self.names_durable, &op);
        }
        self.seen = self.durable.clone();
        self.names = self.names_durable.clone();
        self
    }
}

fn rename(names: &mut BTreeMap<String, usize>, op: &SimOp) {
    match op {
        SimOp::Create { name, file, .. } => {
            names.insert(name.clone(), *file);
        }
        SimOp::Rename { from, to } => {
            if let Some(file) = names.remove(from) {
                names.insert(to.clone(), file);
            }
        }
        SimOp::Remove { name } => {
            names.remove(name);
        }
        _ => {}
    }
}

/// A directory in memory. Clones are the same directory.
#[derive(Clone, Default)]
pub struct SimDir(Arc<Mutex<State>>);

impl fmt::Debug for SimDir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SimDir")
    }
}

impl SimDir {
    /// An empty directory.
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks `hook` before each operation from now on.
    pub fn inject(&self, hook: impl FnMut(&SimOp) -> Fault + Send + 'static) {
        self.0.lock().hook = Some(Box::new(hook));
    }

    /// Operations happen again.
    pub fn heal(&self) {
        self.0.lock().hook = None;
    }

    /// How many operations there were.
    pub fn ops(&self) -> usize {
        self.0.lock().trace.len()
    }

    /// The operations so far.
    pub fn trace(&self) -> Vec<SimOp> {
        self.0.lock().trace.clone()
    }

    /// The directory as found after a power loss behind the first `ops` operations.
    pub fn after_power_loss(&self, ops: usize, keep: &mut dyn FnMut() -> bool) -> Self {
        Self::from_model(self.replay(ops).power_loss(keep))
    }

    /// The directory as a new process finds it after the old one died behind the first `ops`
    /// operations: the page cache survives.
    pub fn after_process_death(&self, ops: usize) -> Self {
        Self::from_model(self.replay(ops))
    }

    fn replay(&self, ops: usize) -> Model {
        let state = self.0.lock();
        let mut disk = state.base.clone();
        for op in &state.trace[..ops] {
            disk.apply(op);
        }
        disk
    }

    fn from_model(disk: Model) -> Self {
        Self(Arc::new(Mutex::new(State {
            base: disk.clone(),
            disk,
            ..State::default()
        })))
    }

    /// The content of a file, as seen.
    pub fn content(&self, name: &str) -> Option<Vec<u8>> {
        let state = self.0.lock();
        let file = *state.disk.names.get(name)?;
        Some(state.disk.seen[file].clone())
    }

    /// Replaces a file's content as seen and as on the disk: for damage.
    pub fn set_content(&self, name: &str, bytes: Vec<u8>) {
        let mut state = self.0.lock();
        if let Some(&file) = state.disk.names.get(name) {
            state.disk.seen[file].clone_from(&bytes);
            state.disk.durable[file] = bytes;
        }
    }

    fn run(&self, mut op: SimOp, what: &'static str, name: &str) -> Result<(), IoError> {
        let mut state = self.0.lock();
        let fault = match &mut state.hook {
            Some(hook) => hook(&op),
            None => Fault::None,
        };
        let failed = |errno| {
            Err(IoError {
                op: what,
                name: name.to_owned(),
                errno,
            })
        };
        let result = match fault {
            Fault::None => Ok(()),
            Fault::Fail(errno) => match &mut op {
                SimOp::Sync { failed: lost, .. } => {
                    *lost = true;
                    failed(errno)
                }
                _ => return failed(errno),
            },
            Fault::Cut(at) => {
                if let SimOp::Write { bytes, .. } = &mut op {
                    bytes.truncate(at);
                }
                failed(rustix::io::Errno::IO.raw_os_error())
            }
        };
        state.disk.apply(&op);
        state.trace.push(op);
        result
    }
}

impl Dir for SimDir {
    fn create(&self, name: &str, len: u64) -> Result<Arc<dyn File>, IoError> {
        let file = {
            let state = self.0.lock();
            if state.disk.names.contains_key(name) {
                let errno = rustix::io::Errno::EXIST.raw_os_error();
                return Err(IoError {
                    op: "create",
                    name: name.to_owned(),
                    errno,
                });
            }
            state.disk.seen.len()
        };
        let op = SimOp::Create {
            name: name.to_owned(),
            file,
            len: len as usize,
        };
        self.run(op, "create", name)?;
        Ok(Arc::new(SimFile {
            dir: self.clone(),
            file,
            name: name.to_owned(),
        }))
    }

    fn open(&self, name: &str) -> Result<Arc<dyn File>, IoError> {
        match self.0.lock().disk.names.get(name) {
            Some(&file) => Ok(Arc::new(SimFile {
                dir: self.clone(),
                file,
                name: name.to_owned(),
            })),
            None => {
                let errno = rustix::io::Errno::NOENT.raw_os_error();
                Err(IoError {
                    op: "open",
                    name: name.to_owned(),
                    errno,
                })
            }
        }
    }

    fn list(&self) -> Result<Vec<String>, IoError> {
        Ok(self.0.lock().disk.names.keys().cloned().collect())
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), IoError> {
        self.run(
            SimOp::Rename {
                from: from.to_owned(),
                to: to.to_owned(),
            },
            "rename",
            from,
        )
    }

    fn remove(&self, name: &str) -> Result<(), IoError> {
        self.run(
            SimOp::Remove {
                name: name.to_owned(),
            },
            "unlink",
            name,
        )
    }

    fn sync(&self) -> Result<(), IoError> {
        self.run(SimOp::SyncDir, "fsync", "SimDir")
    }

    fn name(&self) -> String {
        "SimDir".to_owned()
    }
}

#[derive(Debug)]
struct SimFile {
    dir: SimDir,
    file: usize,
    name: String,
}

impl File for SimFile {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
        let op = SimOp::Write {
            file: self.file,
            offset: offset as usize,
            bytes: bytes.to_vec(),
        };
        self.dir.run(op, "pwrite", &self.name)
    }

    fn sync(&self) -> Result<(), IoError> {
        self.dir.run(
            SimOp::Sync {
                file: self.file,
                failed: false,
            },
            "fdatasync",
            &self.name,
        )
    }

    fn read(&self) -> Result<Vec<u8>, IoError> {
        Ok(self.dir.0.lock().disk.seen[self.file].clone())
    }

    fn name(&self) -> String {
        self.name.clone()
    }
}
