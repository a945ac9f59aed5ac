//! What is asked for and what goes wrong: all of it drawn from the seed, before anything runs.

use moonlivekv::id::RequestId;
use moonlivekv::node::faults::{Fault, Plan, draw};
use serde_json::{Value, json};

use crate::cli::{SoakArgs, TransportKind, VerifyKind};

/// Prompt lengths, in tokens.
pub const CONTEXT: (u64, u64) = (64, 4096);
/// Output lengths, in tokens.
const OUTPUT: (u64, u64) = (400, 1200);
/// Output tokens of a request that only goes round.
pub const ROUND: u64 = 6000;
/// Output tokens between two migrations of a request.
const GAP: (u64, u64) = (16, 96);
/// Token ids that are in every vocabulary.
const VOCABULARY: std::ops::Range<u64> = 4..256;

/// Faults with their weights; what is left of 100 is no fault. `late-write` is not among them: it
/// needs an attempt that is over, and has its own case in the demonstration.
pub const MIX: &[(Fault, u64)] = &[
    (Fault::KillSource, 6),
    (Fault::KillDestination, 5),
    (Fault::KillCoordinator, 3),
    (Fault::PauseCoordinator, 3),
    (Fault::CorruptWire, 3),
    (Fault::CorruptSourceRead, 3),
    (Fault::CorruptResidentEarly, 3),
    (Fault::CorruptResidentLate, 2),
    (Fault::CorruptControl, 3),
    (Fault::StaleEpoch, 3),
    (Fault::DropCommitReply, 3),
    (Fault::SlowLink, 2),
];

/// Whether a process dies of it.
pub fn kills(fault: Fault) -> bool {
    matches!(
        fault,
        Fault::KillSource | Fault::KillDestination | Fault::KillCoordinator
    )
}

/// Numbers in order, drawn from a seed.
pub struct Dice(u64);

impl Dice {
    /// The sequence number `stream` of a seed.
    pub fn new(seed: u64, stream: u64) -> Self {
        Self(draw(seed ^ draw(stream)))
    }

    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0 = draw(self.0);
        self.0
    }

    /// Uniform in `low..=high`.
    pub fn within(&mut self, (low, high): (u64, u64)) -> u64 {
        low + self.any() % (high - low + 1)
    }

    /// Uniform in the logarithm: as many short ones in an octave as long ones.
    fn scaled(&mut self, (low, high): (u64, u64)) -> u64 {
        let unit = (self.any() >> 11) as f64 / (1u64 << 53) as f64;
        let (l, h) = ((low as f64).ln(), ((high + 1) as f64).ln());
        ((l + (h - l) * unit).exp() as u64).clamp(low, high)
    }
}

/// One client's request, the same for the oracle and for the run with faults.
#[derive(Debug, Clone)]
pub struct Ask {
    /// Its name.
    pub request: RequestId,
    /// Prompt tokens.
    pub context: u64,
    /// The body of the POST.
    pub body: Value,
}

/// The request number `n`.
pub fn ask(seed: u64, n: u64) -> Ask {
    let mut dice = Dice::new(seed, 2 * n);
    let mut id = [0u8; 16];
    id[..8].copy_from_slice(&dice.any().to_le_bytes());
    id[8..].copy_from_slice(&dice.any().to_le_bytes());
    let request = RequestId(id);
    let (context, output) = (dice.scaled(CONTEXT), dice.within(OUTPUT));
    let span = (VOCABULARY.start, VOCABULARY.end - 1);
    let prompt: Vec<u64> = (0..context).map(|_| dice.within(span)).collect();
    let greedy = dice.any().is_multiple_of(4);
    let body = json!({
        "stream": true, "max_tokens": output, "seed": dice.any() >> 1, "prompt": prompt,
        "request_id": request.to_string(), "ignore_eos": true,
        "temperature": if greedy { 0.0 } else { 0.8 }, "top_k": 50, "top_p": 0.95,
        "repetition_penalty": 1.05,
    });
    Ask {
        request,
        context,
        body,
    }
}

/// Where a fault is planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Victim {
    /// The owner of the request.
    Source,
    /// Where it goes.
    Destination,
    /// Whoever drives.
    Coordinator,
}

/// One migration.
#[derive(Debug, Clone)]
pub struct Move {
    /// Output tokens to wait for first.
    pub gap: u64,
    /// The bulk path.
    pub transport: TransportKind,
    /// What is hashed inside the fence.
    pub verify: VerifyKind,
    /// What goes wrong, and where.
    pub fault: Option<(Plan, Victim)>,
    /// Picks the destination among those there are.
    pub pick: u64,
}

/// The migration number `n`.
pub fn migration(args: &SoakArgs, n: u64) -> Move {
    let mut dice = Dice::new(args.seed, 2 * n + 1);
    let gap = dice.within(GAP);
    let mut transport = match (args.transport, dice.any().is_multiple_of(2)) {
        (Some(one), _) => one,
        (None, true) => TransportKind::Tcp,
        (None, false) => TransportKind::Shm,
    };
    let mut at = dice.any() % 100;
    let mut drawn = None;
    for (fault, weight) in MIX {
        if at < *weight {
            drawn = Some(*fault);
            break;
        }
        at -= weight;
    }
    if drawn == Some(Fault::CorruptWire) {
        transport = TransportKind::Tcp;
    }
    let late = drawn == Some(Fault::CorruptResidentLate);
    let full = late || dice.any().is_multiple_of(16);
    let fault = drawn.map(|fault| {
        let steps = fault.steps();
        let step = steps[(dice.any() % steps.len() as u64) as usize];
        let plan = Plan {
            fault,
            step,
            seed: dice.any(),
        };
        (plan, victim(fault, transport))
    });
    Move {
        gap,
        transport,
        verify: if full {
            VerifyKind::Full
        } else {
            VerifyKind::Resident
        },
        fault,
        pick: dice.any(),
    }
}

fn victim(fault: Fault, transport: TransportKind) -> Victim {
    match fault {
        // Where the payload is read and sent: the owner's side over TCP, the reader's elsewhere.
        Fault::CorruptWire | Fault::CorruptSourceRead | Fault::SlowLink
            if transport == TransportKind::Tcp =>
        {
            Victim::Source
        }
        Fault::KillSource
        | Fault::StaleEpoch
        | Fault::LoseAhead
        | Fault::CorruptAhead
        | Fault::StaleAhead => Victim::Source,
        Fault::KillCoordinator | Fault::PauseCoordinator => Victim::Coordinator,
        _ => Victim::Destination,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mix_kills_in_more_than_one_of_ten_and_leaves_most_alone() {
        let total: u64 = MIX.iter().map(|(_, w)| w).sum();
        let deadly: u64 = MIX.iter().filter(|(f, _)| kills(*f)).map(|(_, w)| w).sum();
        assert!(total <= 45 && deadly >= 12, "{total} {deadly}");
    }

    #[test]
    fn requests_are_spread_over_the_lengths_and_the_same_seed_draws_the_same() {
        let lengths: Vec<u64> = (0..400).map(|n| ask(7, n).context).collect();
        assert!(lengths.iter().all(|l| (CONTEXT.0..=CONTEXT.1).contains(l)));
        for octave in 6..12 {
            let (low, high) = (1u64 << octave, 2u64 << octave);
            assert!(
                lengths.iter().filter(|l| (low..high).contains(l)).count() > 30,
                "few between {low} and {high}"
            );
        }
        assert_eq!(ask(7, 3).body, ask(7, 3).body);
        assert_ne!(ask(7, 3).body, ask(8, 3).body);
    }
}
