//! The conformance suite of [`EngineAdapter`]: each promise of the contract as a clause that any
//! adapter can be run through, and for each clause an adapter that breaks just it.
//!
//! ```text
//! let report = conformance::run(|| Pair { source: my_driver(1), destination: my_driver(2) });
//! assert!(report.holds(), "{report}");
//! for fault in Fault::ALL {                    // that the clauses see what they claim to see
//!     let report = conformance::run_clause(fault.clause(), || fault.spoil(pair()));
//!     assert!(report.is_broken(fault.clause()));
//! }
//! ```
//!
//! The suite moves KV itself, row by row through the layouts of both pools, so that it needs
//! nothing but the two adapters; it uses no transport and no protocol. Source and destination
//! should differ where the contract says they may: block size, axis order, physical block order.

mod bad;
mod both;
mod faults;
mod flow;
mod source;
mod stage;
mod start;
#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) mod toy;
#[cfg(test)]
mod toy_adapter;
#[cfg(test)]
mod toy_import;

pub use faults::Fault;

use super::adapter::EngineAdapter;
use crate::id::{OwnerEpoch, RequestId};
use std::fmt;
use std::sync::Arc;

/// A request that a driver can start. Equal plans give equal prompts and equal parameters on every
/// engine of the same model, whatever the request's id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Tokens of the prompt, all below the vocabulary's size; drawn from `seed` by the driver.
    pub prompt_tokens: u32,
    /// Draws the prompt, and seeds the request's generator.
    pub seed: u64,
    /// Sampled with temperature and penalties; else greedy.
    pub sampled: bool,
    /// Under a grammar, with a stop string that never matches.
    pub constrained: bool,
    /// Most output tokens. The driver makes sure that nothing else ends the request.
    pub max_output: u32,
}

/// A token that an engine handed to emission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Emitted {
    /// Under which ownership.
    pub owner_epoch: OwnerEpoch,
    /// Output token number, from 1.
    pub seq: u64,
    /// The token.
    pub token: u32,
}

/// An engine under test: its adapter, and what the suite needs of its serving side.
pub trait Driver {
    /// The adapter.
    fn adapter(&self) -> Arc<dyn EngineAdapter>;

    /// The adapter through which the engine's own memory is seen. Where [`adapter`](Self::adapter)
    /// speaks to another process, this is the one inside of that process, with the same ids.
    fn resident(&self) -> Arc<dyn EngineAdapter> {
        self.adapter()
    }

    /// Admits a request under owner epoch 1. `Err` says why this engine cannot run such a plan; the
    /// clause is then reported as not applicable.
    fn start(&mut self, request: RequestId, plan: &Plan) -> Result<(), String>;

    /// Lets every runnable request decode at least one token (a long prompt may take several
    /// calls). An engine with a loop of its own is gated: it decodes only in here.
    fn step(&mut self);

    /// All tokens emitted for a request so far, oldest first, repeats included.
    fn emitted(&self, request: RequestId) -> Vec<Emitted>;

    /// The client goes away.
    fn abort(&mut self, request: RequestId);

    /// Makes the engine rewrite the KV slot of a sealed token, as a context shift or a requantized
    /// page would. `false` if nothing in this engine ever does.
    fn rewrite_sealed_slot(&mut self, request: RequestId, token: u64) -> bool;
}

/// Two engines of one model, idle.
pub struct Pair {
    /// Where requests start.
    pub source: Box<dyn Driver>,
    /// Where they go.
    pub destination: Box<dyn Driver>,
}

/// Why a clause did not hold, or could not be tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failed {
    /// The contract is broken.
    Broken(String),
    /// This engine has nothing to try it on.
    Skipped(String),
}

impl From<String> for Failed {
    fn from(why: String) -> Self {
        Self::Broken(why)
    }
}

/// What a clause's function gives.
pub(crate) type Check = Result<(), Failed>;

/// One promise of the contract.
#[derive(Debug, Clone, Copy)]
pub struct Clause {
    /// Its name in reports and docs.
    pub id: &'static str,
    /// What must hold.
    pub text: &'static str,
    pub(crate) check: fn(&mut Pair) -> Check,
}

/// All clauses.
pub fn clauses() -> impl Iterator<Item = Clause> {
    [
        source::CLAUSES,
        stage::CLAUSES,
        start::CLAUSES,
        both::CLAUSES,
    ]
    .into_iter()
    .flatten()
    .copied()
}

/// How one clause came out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It holds.
    Holds,
    /// It does not, and where it was seen.
    Broken(String),
    /// The engine declares that it lacks what the clause is about.
    NotApplicable(String),
}

/// How all clauses came out.
#[derive(Debug, Clone)]
pub struct Report {
    /// In the order they were run.
    pub rows: Vec<(Clause, Outcome)>,
}

impl Report {
    /// No clause is broken.
    pub fn holds(&self) -> bool {
        self.broken().next().is_none()
    }

    /// Clauses that are broken, and how.
    pub fn broken(&self) -> impl Iterator<Item = (&Clause, &str)> {
        self.rows
            .iter()
            .filter_map(|(clause, outcome)| match outcome {
                Outcome::Broken(why) => Some((clause, why.as_str())),
                _ => None,
            })
    }

    /// Clauses that could not be tried, and why.
    pub fn not_applicable(&self) -> impl Iterator<Item = (&Clause, &str)> {
        self.rows
            .iter()
            .filter_map(|(clause, outcome)| match outcome {
                Outcome::NotApplicable(why) => Some((clause, why.as_str())),
                _ => None,
            })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (clause, outcome) in &self.rows {
            match outcome {
                Outcome::Holds => writeln!(f, "holds    {}", clause.id)?,
                Outcome::Broken(why) => {
                    writeln!(f, "BROKEN   {}: {why}\n         {}", clause.id, clause.text)?;
                }
                Outcome::NotApplicable(why) => writeln!(f, "skipped  {}: {why}", clause.id)?,
            }
        }
        Ok(())
    }
}

/// Runs an engine through every clause; each gets a fresh pair.
pub fn run(make: impl Fn() -> Pair) -> Report {
    Report {
        rows: clauses().map(|c| (c, try_clause(&c, &make))).collect(),
    }
}

/// Runs one clause by its id; `None` if there is no such clause.
pub fn run_clause(id: &str, make: impl Fn() -> Pair) -> Option<Outcome> {
    clauses()
        .find(|c| c.id == id)
        .map(|c| try_clause(&c, &make))
}

fn try_clause(clause: &Clause, make: &impl Fn() -> Pair) -> Outcome {
    match (clause.check)(&mut make()) {
        Ok(()) => Outcome::Holds,
        Err(Failed::Broken(why)) => Outcome::Broken(why),
        Err(Failed::Skipped(why)) => Outcome::NotApplicable(why),
    }
}
