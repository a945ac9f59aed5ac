//! Processes, and the machines within them.

pub const WORKERS: usize = 3;
pub const COORDS: usize = 2;

/// A process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Party {
    W(usize),
    C(usize),
    G,
    S,
}

impl Party {
    pub fn index(self) -> usize {
        match self {
            Party::W(i) => i,
            Party::C(i) => WORKERS + i,
            Party::G => WORKERS + COORDS,
            Party::S => WORKERS + COORDS + 1,
        }
    }

    pub fn all() -> impl Iterator<Item = Party> {
        (0..WORKERS)
            .map(Party::W)
            .chain((0..COORDS).map(Party::C))
            .chain([Party::G, Party::S])
    }
}

/// A machine within a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mach {
    Src,
    Dst,
    Reb,
    Coord,
    Acc,
    /// The operator's `watch`: reads, no machine.
    Watch,
}
