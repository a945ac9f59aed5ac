//! A tracing span for each phase of a migration at each party: request, attempt, phase, role.

use tracing::Span;

use crate::id::{MigrationEpoch, RequestId};
use crate::migrate::io::{Report, Step};

/// A step as reports, spans and scripts spell it.
pub fn step_name(step: Step) -> &'static str {
    match step {
        Step::Prepare => "PREPARE",
        Step::Reserve => "RESERVE",
        Step::Stream => "STREAM",
        Step::Fence => "FENCE",
        Step::CopyTail => "COPY-TAIL",
        Step::ImportTail => "IMPORT-TAIL",
        Step::Verify => "VERIFY",
        Step::Arm => "ARM",
        Step::Commit => "COMMIT",
        Step::Resume => "RESUME",
        Step::Gc => "GC",
    }
}

/// The phase that an attempt is in here, as a span at level `debug` under the target `phase`. One
/// that nobody listens to costs a load of one flag.
#[derive(Debug, Default)]
pub struct Phase {
    span: Option<Span>,
    at: Option<(MigrationEpoch, Step)>,
}

impl Phase {
    /// Follows a machine's reports: a step that begins ends the one before it, and the end of an
    /// attempt ends the last one.
    pub fn follow(
        &mut self,
        role: &'static str,
        request: RequestId,
        epoch: MigrationEpoch,
        report: &Report,
    ) {
        match report {
            Report::Entered(step) => self.enter(role, request, epoch, *step),
            Report::Released { .. } => self.end(),
            _ => {}
        }
    }

    /// A step begins, which ends the one before it; one that has begun goes on.
    pub fn enter(
        &mut self,
        role: &'static str,
        request: RequestId,
        epoch: MigrationEpoch,
        step: Step,
    ) {
        if self.at.replace((epoch, step)) == Some((epoch, step)) {
            return;
        }
        let phase = step_name(step);
        let span =
            tracing::debug_span!(target: "phase", "phase", phase, role, %request, epoch = epoch.0);
        // Dropping the one before closes it.
        self.span = (!span.is_disabled()).then_some(span);
    }

    /// Ends the present phase, if there is one.
    pub fn end(&mut self) {
        *self = Self::default();
    }

    /// The present phase, to run an event's work in.
    pub fn span(&self) -> Span {
        self.span.clone().unwrap_or_else(Span::none)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;
    use std::sync::Arc;
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    /// Notes what each span is made with, and the order in which spans end.
    #[derive(Default, Clone)]
    struct Notes(Arc<Mutex<Vec<String>>>);

    impl Subscriber for Notes {
        fn enabled(&self, m: &Metadata<'_>) -> bool {
            m.target() == "phase"
        }
        fn new_span(&self, attributes: &Attributes<'_>) -> Id {
            struct Fields(String);
            impl tracing::field::Visit for Fields {
                fn record_debug(&mut self, f: &tracing::field::Field, v: &dyn std::fmt::Debug) {
                    self.0.push_str(&format!("{}={v:?} ", f.name()));
                }
            }
            let mut fields = Fields(String::new());
            attributes.record(&mut fields);
            let mut notes = self.0.lock();
            notes.push(fields.0);
            Id::from_u64(notes.len() as u64)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, _: &Event<'_>) {}
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
        fn try_close(&self, id: Id) -> bool {
            self.0.lock().push(format!("closed {}", id.into_u64()));
            true
        }
    }

    #[test]
    fn each_phase_is_a_span_with_request_epoch_and_name_that_ends_where_the_next_begins() {
        let notes = Notes::default();
        tracing::subscriber::with_default(notes.clone(), || {
            let (mut phase, request) = (Phase::default(), RequestId([7; 16]));
            let epoch = MigrationEpoch(3);
            for step in [Step::Verify, Step::Verify, Step::Arm] {
                phase.follow("destination", request, epoch, &Report::Entered(step));
            }
            let end = Report::Released { quarantined: 0 };
            phase.follow("destination", request, epoch, &end);
        });
        let notes = notes.0.lock();
        assert!(
            notes[0].contains("phase=\"VERIFY\"") && notes[0].contains("epoch=3"),
            "{notes:?}"
        );
        assert!(
            notes[0].contains(&format!("request={}", RequestId([7; 16]))),
            "{notes:?}"
        );
        let closed: Vec<&String> = notes.iter().filter(|n| n.starts_with("closed")).collect();
        assert_eq!(closed.len(), 2, "{notes:?}");
    }
}
