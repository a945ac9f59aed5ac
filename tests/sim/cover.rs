//! The coverage matrix: which fault hit which party in which step, and which cells cannot be hit.

use moonlivekv::migrate::io::Step;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Drop,
    Delay,
    Reorder,
    Duplicate,
    Corrupt,
    Crash,
    Pause,
    LostReply,
}

impl Fault {
    pub const ALL: [Fault; 8] = [
        Fault::Drop,
        Fault::Delay,
        Fault::Reorder,
        Fault::Duplicate,
        Fault::Corrupt,
        Fault::Crash,
        Fault::Pause,
        Fault::LostReply,
    ];
}

/// A party's part in the attempt under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Source,
    Destination,
    Spare,
    Coordinator,
    Gateway,
    Store,
}

impl Role {
    pub const ALL: [Role; 6] = [
        Role::Source,
        Role::Destination,
        Role::Spare,
        Role::Coordinator,
        Role::Gateway,
        Role::Store,
    ];
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    pub step: Step,
    pub fault: Fault,
    pub role: Role,
}

pub const CELLS: usize = Step::ALL.len() * Fault::ALL.len() * Role::ALL.len();

impl Cell {
    pub fn index(self) -> usize {
        (self.step as usize * Fault::ALL.len() + self.fault as usize) * Role::ALL.len()
            + self.role as usize
    }

    pub fn at(index: usize) -> Self {
        let role = Role::ALL[index % Role::ALL.len()];
        let rest = index / Role::ALL.len();
        let fault = Fault::ALL[rest % Fault::ALL.len()];
        Self {
            step: Step::ALL[rest / Fault::ALL.len()],
            fault,
            role,
        }
    }

    pub fn all() -> impl Iterator<Item = Cell> {
        (0..CELLS).map(Cell::at)
    }

    /// Why this cell cannot be hit; `None`: it can.
    pub fn impossible(self) -> Option<&'static str> {
        match (self.step, self.fault, self.role) {
            (Step::Prepare, Fault::LostReply, Role::Destination) => Some(
                "the destination writes nothing of an attempt before it has heard of the intent",
            ),
            (Step::Resume, Fault::LostReply, Role::Destination) => Some(
                "RESUME begins when the destination has its evidence; it writes nothing after that",
            ),
            _ => None,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Coverage {
    pub hits: Vec<u64>,
}

impl Default for Coverage {
    fn default() -> Self {
        Self {
            hits: vec![0; CELLS],
        }
    }
}

impl Coverage {
    pub fn hit(&mut self, cell: Cell) {
        self.hits[cell.index()] += 1;
    }

    pub fn add(&mut self, other: &Coverage) {
        for (a, b) in self.hits.iter_mut().zip(&other.hits) {
            *a += b;
        }
    }

    /// The possible cell with the fewest hits.
    pub fn least(&self) -> (Cell, u64) {
        Cell::all()
            .filter(|c| c.impossible().is_none())
            .map(|c| (c, self.hits[c.index()]))
            .min_by_key(|(_, n)| *n)
            .expect("there are possible cells")
    }

    /// A table: one line a step and fault, one column a role; `-` cannot be hit.
    pub fn table(&self) -> String {
        let mut text = format!("{:<11}{:<10}", "step", "fault");
        for role in Role::ALL {
            text += &format!("{:>12}", format!("{role:?}"));
        }
        for step in Step::ALL {
            for fault in Fault::ALL {
                text += &format!("\n{:<11}{:<10}", format!("{step:?}"), format!("{fault:?}"));
                for role in Role::ALL {
                    let cell = Cell { step, fault, role };
                    let n = match cell.impossible() {
                        Some(_) => "-".to_string(),
                        None => self.hits[cell.index()].to_string(),
                    };
                    text += &format!("{n:>12}");
                }
            }
        }
        for cell in Cell::all() {
            if let Some(why) = cell.impossible() {
                text += &format!(
                    "\n- {:?} {:?} {:?}: {why}",
                    cell.step, cell.fault, cell.role
                );
            }
        }
        text
    }
}
