//! Which faults strike when: a few chosen cells per seed, prepared so that they can happen, and a
//! background rate.

use super::cover::{CELLS, Cell, Coverage, Fault, Role};
use super::rng::Rng;
use super::world::{Ev, MS, Party, US, WORKERS, World, note};
use moonlivekv::migrate::destination;
use moonlivekv::migrate::io::Step;
use moonlivekv::migrate::source;
use moonlivekv::route::Cause;

pub struct Faults {
    pub planned: Vec<Cell>,
    /// Background: one in this many opportunities (0: none).
    background: u64,
    pub coverage: Coverage,
    pub count: u64,
}

/// What 100,000 seeds hit fewer than 250 times before these cells got their extra draw.
const RARE: [(Step, Fault, Role); 7] = [
    (Step::CopyTail, Fault::Crash, Role::Store),
    (Step::CopyTail, Fault::Pause, Role::Store),
    (Step::ImportTail, Fault::Corrupt, Role::Source),
    (Step::Arm, Fault::Corrupt, Role::Source),
    (Step::Arm, Fault::Corrupt, Role::Destination),
    (Step::Resume, Fault::LostReply, Role::Source),
    (Step::Resume, Fault::LostReply, Role::Coordinator),
];

impl Faults {
    pub fn new(rng: &mut Rng, calm: bool) -> Self {
        let n = if calm { 0 } else { rng.range(4, 10) };
        let mut planned = Vec::new();
        while (planned.len() as u64) < n {
            let cell = Cell::at(rng.below(CELLS as u64) as usize);
            // Short steps, and those that an earlier fault often forestalls, are drawn more often.
            let weight = match cell.step {
                Step::Prepare => 1,
                Step::Reserve | Step::Stream | Step::Fence | Step::CopyTail | Step::Gc => 2,
                Step::Verify | Step::Commit | Step::Resume => 3,
                Step::ImportTail | Step::Arm => 4,
            };
            if cell.impossible().is_none() && rng.chance(weight, 4) {
                planned.push(cell);
            }
        }
        // Cells that a fault rarely finds its chance in: one more try in every fourth seed, drawn
        // beside the seed's other numbers so that the other seeds run as they would without it.
        let mut aside = Rng::new(rng.clone().next());
        if !calm && aside.chance(1, 4) {
            let (step, fault, role) = RARE[aside.below(RARE.len() as u64) as usize];
            planned.push(Cell { step, fault, role });
        }
        let background = if calm {
            0
        } else {
            [0, 100, 200, 400][rng.below(4) as usize]
        };
        Self {
            planned,
            background,
            coverage: Coverage::default(),
            count: 0,
        }
    }
}

impl World {
    pub fn role(&self, party: Party) -> Role {
        match (party, self.roles) {
            (Party::C(_), _) => Role::Coordinator,
            (Party::G, _) => Role::Gateway,
            (Party::S, _) => Role::Store,
            (Party::W(w), Some((src, _))) if w == src => Role::Source,
            (Party::W(w), Some((_, dst))) if w == dst => Role::Destination,
            _ => Role::Spare,
        }
    }

    /// Whether `fault` strikes here, at one of these parties; counts it if so.
    pub fn fault(&mut self, fault: Fault, parties: &[Party]) -> bool {
        self.fault_of(fault, parties, true)
    }

    /// The same for messages beside the protocol, which only planned faults strike.
    pub fn fault_of(&mut self, fault: Fault, parties: &[Party], background: bool) -> bool {
        if self.healed {
            return false;
        }
        let roles: Vec<Role> = parties.iter().map(|p| self.role(*p)).collect();
        let step = self.step;
        let planned = self.faults.planned.iter().position(|cell| {
            Some(cell.step) == step && cell.fault == fault && roles.contains(&cell.role)
        });
        let cell = match (planned, step) {
            (Some(i), _) => Some(self.faults.planned.swap_remove(i)),
            (None, step) => {
                let per = self.faults.background;
                if per == 0 || !background || !self.rng.chance(1, per) {
                    return false;
                }
                step.map(|step| Cell {
                    step,
                    fault,
                    role: roles[0],
                })
            }
        };
        self.faults.count += 1;
        if let Some(cell) = cell {
            self.faults.coverage.hit(cell);
        }
        note!(self, "FAULT {fault:?} at {parties:?}");
        true
    }

    fn has_planned(&self, fault: Fault, role: Role) -> bool {
        let step = self.step;
        self.faults
            .planned
            .iter()
            .any(|c| Some(c.step) == step && c.fault == fault && c.role == role)
    }

    /// An event is about to be handled by `party`: it may crash or stop there.
    pub fn strike(&mut self, party: Party) {
        if self.healed {
            return;
        }
        let role = self.role(party);
        // A spare has few events, those of the others are spread over the step.
        let often = if role == Role::Spare { 1 } else { 3 };
        if self.has_planned(Fault::Crash, role) && self.rng.chance(1, often) {
            self.fault(Fault::Crash, &[party]);
            let back = self.rng.spread(MS, 40 * MS);
            self.crash(party, back);
        } else if self.has_planned(Fault::Pause, role) && self.rng.chance(1, often) {
            self.fault(Fault::Pause, &[party]);
            let ns = self.rng.spread(200 * US, 80 * MS);
            self.pause(party, ns);
        } else if self.faults.background > 0 && self.rng.chance(1, self.faults.background * 100) {
            let crash = self.rng.chance(1, 2);
            self.fault_now(if crash { Fault::Crash } else { Fault::Pause }, party);
        }
    }

    fn fault_now(&mut self, fault: Fault, party: Party) {
        self.faults.count += 1;
        if let Some(step) = self.step {
            let role = self.role(party);
            self.faults.coverage.hit(Cell { step, fault, role });
        }
        let ns = self.rng.spread(MS, 40 * MS);
        match fault {
            Fault::Crash => self.crash(party, ns),
            _ => self.pause(party, ns),
        }
    }

    /// The attempt under way enters a step: what the planned faults of this step need is prepared.
    pub fn enter(&mut self, step: Step) {
        if self.step == Some(step) || self.healed {
            return;
        }
        self.step = Some(step);
        let Some((src, dst)) = self.roles else { return };
        let planned: Vec<Cell> = self.faults.planned.clone();
        for cell in planned {
            if cell.fault != Fault::LostReply {
                continue;
            }
            let ahead = matches!(cell.step, Step::Resume | Step::Gc) && step == Step::Commit;
            if cell.step == step || ahead {
                self.provoke_write(cell.role, src, dst, ahead);
            }
        }
    }

    /// Makes a party write the record, while the others stand still.
    fn provoke_write(&mut self, role: Role, src: usize, dst: usize, racing: bool) {
        let soon = self.rng.range(1, 20 * US);
        let still = self.rng.range(2 * MS, 12 * MS);
        let spare = (0..WORKERS)
            .find(|w| *w != src && *w != dst)
            .expect("three workers");
        let cause = Cause::Cancelled;
        let (src_life, dst_life) = (self.life(Party::W(src)), self.life(Party::W(dst)));
        if !racing {
            for (w, its) in [(src, Role::Source), (dst, Role::Destination)] {
                if its != role {
                    self.at(
                        1,
                        Ev::Pause {
                            party: Party::W(w),
                            ns: still,
                        },
                    );
                }
            }
        }
        match role {
            Role::Source => {
                let done = source::Done::Cancel { cause };
                self.at(
                    soon,
                    Ev::SrcTell {
                        w: src,
                        life: src_life,
                        done,
                    },
                );
            }
            Role::Destination => {
                let done = destination::Done::Cancel { cause };
                self.at(
                    soon,
                    Ev::DstTell {
                        w: dst,
                        life: dst_life,
                        done,
                    },
                );
            }
            Role::Coordinator | Role::Store => {
                for c in 0..self.coords.len() {
                    self.at(soon, Ev::CancelCoord { c });
                }
            }
            Role::Gateway | Role::Spare => self.at(soon, Ev::Suspect { target: spare }),
        }
    }
}
