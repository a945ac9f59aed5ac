//! Which fault is injected into which daemon, at which step.

use moonlivekv::node::faults::{Fault, Plan, step_name};

use crate::cli::{DemoArgs, InjectKind, TransportKind};

/// A fault with its victim.
#[derive(Debug, Clone)]
pub struct Injected {
    /// The fault, its step and its seed.
    pub plan: Plan,
    /// The daemon that is started with it.
    pub victim: &'static str,
}

/// The library's name for the command line's.
pub fn of(kind: InjectKind) -> Fault {
    match kind {
        InjectKind::CorruptWire => Fault::CorruptWire,
        InjectKind::CorruptSourceRead => Fault::CorruptSourceRead,
        InjectKind::CorruptResidentEarly => Fault::CorruptResidentEarly,
        InjectKind::CorruptResidentLate => Fault::CorruptResidentLate,
        InjectKind::CorruptControl => Fault::CorruptControl,
        InjectKind::StaleEpoch => Fault::StaleEpoch,
        InjectKind::LateWrite => Fault::LateWrite,
        InjectKind::KillSource => Fault::KillSource,
        InjectKind::KillDestination => Fault::KillDestination,
        InjectKind::KillCoordinator => Fault::KillCoordinator,
        InjectKind::PauseCoordinator => Fault::PauseCoordinator,
        InjectKind::DropCommitReply => Fault::DropCommitReply,
        InjectKind::SlowLink => Fault::SlowLink,
        InjectKind::LoseAhead => Fault::LoseAhead,
        InjectKind::CorruptAhead => Fault::CorruptAhead,
        InjectKind::StaleAhead => Fault::StaleAhead,
    }
}

/// Whether a worker's process ends by it.
pub fn kills_a_worker(fault: Fault) -> bool {
    matches!(fault, Fault::KillSource | Fault::KillDestination)
}

/// The first request runs on `w0` and moves to `w1`.
fn victim(fault: Fault, transport: TransportKind) -> &'static str {
    match fault {
        // Where the payload is read and sent: the owner's side over TCP, the reader's elsewhere.
        Fault::CorruptWire | Fault::CorruptSourceRead | Fault::SlowLink | Fault::LateWrite => {
            if transport == TransportKind::Tcp {
                "w0"
            } else {
                "w1"
            }
        }
        Fault::KillSource
        | Fault::StaleEpoch
        | Fault::LoseAhead
        | Fault::CorruptAhead
        | Fault::StaleAhead => "w0",
        Fault::CorruptResidentEarly
        | Fault::CorruptResidentLate
        | Fault::CorruptControl
        | Fault::KillDestination
        | Fault::DropCommitReply => "w1",
        Fault::KillCoordinator | Fault::PauseCoordinator => "c0",
    }
}

/// Draws the step.
pub fn draw(kind: InjectKind, args: &DemoArgs) -> Injected {
    let fault = of(kind);
    let step = fault.step_of(args.seed);
    let plan = Plan {
        fault,
        step,
        seed: args.seed,
    };
    Injected {
        plan,
        victim: victim(fault, args.transport),
    }
}

impl Injected {
    /// The step's name.
    pub fn step(&self) -> &'static str {
        step_name(self.plan.step)
    }
}
