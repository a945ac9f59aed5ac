//! Exit codes: a script learns from the number alone what to do next.

use std::process::ExitCode;

use moonlivekv::id::ErrorKind;

/// What the program's exit status says. `2` is clap's, for a command line it could not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// Done.
    Ok = 0,
    /// A check that this command exists to make came out false: the demonstration ended FAIL.
    Fail = 1,
    /// The arguments were understood and are wrong: no such request, no such worker.
    Caller = 2,
    /// A daemon could not be reached or died.
    PeerLost = 3,
    /// Nothing was lost and nothing was done: the request stays where it is. Try again.
    Retryable = 4,
    /// A deadline passed.
    Deadline = 5,
    /// Bytes differed from their digest.
    Integrity = 6,
    /// This machine, build or request cannot do that.
    Unsupported = 7,
    /// An invariant of ours is broken; please report it.
    Bug = 70,
}

impl Code {
    /// What a child of ours ended with, where it is one of these.
    pub fn of_child(status: std::process::ExitStatus) -> Self {
        let all = [
            Self::Fail,
            Self::Caller,
            Self::PeerLost,
            Self::Retryable,
            Self::Deadline,
            Self::Integrity,
            Self::Unsupported,
            Self::Bug,
        ];
        let ended = all.into_iter().find(|c| status.code() == Some(*c as i32));
        // Killed, or ended by something that is not ours.
        ended.unwrap_or(Self::PeerLost)
    }
}

impl From<Code> for ExitCode {
    fn from(code: Code) -> Self {
        ExitCode::from(code as u8)
    }
}

impl From<ErrorKind> for Code {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::Retryable => Self::Retryable,
            ErrorKind::PeerLost | ErrorKind::DeviceLost { .. } => Self::PeerLost,
            ErrorKind::Integrity => Self::Integrity,
            ErrorKind::Unsupported => Self::Unsupported,
            ErrorKind::Caller => Self::Caller,
            ErrorKind::Bug => Self::Bug,
        }
    }
}

/// An error that already knows its exit code.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct Coded {
    /// The exit code.
    pub code: Code,
    /// What to print; empty where the command has said it all.
    pub text: String,
}

/// Makes an error with an exit code of its own.
pub fn coded(code: Code, text: impl Into<String>) -> anyhow::Error {
    Coded {
        code,
        text: text.into(),
    }
    .into()
}

/// The code of the first error in the chain that knows one. What the system refuses is never our
/// bug: the argument that named it is wrong, or it may go another time.
fn code_of(error: &anyhow::Error) -> Code {
    error.chain().find_map(known).unwrap_or(Code::Bug)
}

fn known(error: &(dyn std::error::Error + 'static)) -> Option<Code> {
    use moonlivekv::{drive, gateway, node, rpc, wire};
    macro_rules! kinds {
        ($($of:ty => $kind:expr),* $(,)?) => {
            $(if let Some(e) = error.downcast_ref::<$of>() {
                let kind: fn(&$of) -> ErrorKind = $kind;
                return Some(kind(e).into());
            })*
        };
    }
    if let Some(coded) = error.downcast_ref::<Coded>() {
        return Some(coded.code);
    }
    kinds! {
        rpc::DialError => |e| e.kind(),
        rpc::ServeError => |e| e.kind(),
        wire::EndpointError => |e| e.kind(),
        drive::ListenError => |e| e.kind(),
        node::worker::StartError => |e| e.kind,
        node::coordinator::DaemonError => |e| e.kind,
        gateway::StartError => |e| e.kind,
        gateway::log::LogError => |_| ErrorKind::Retryable,
    }
    if let Some(e) = error.downcast_ref::<std::io::Error>() {
        return Some(of_io(e.kind()));
    }
    let status = error.downcast_ref::<tonic::Status>()?;
    use tonic::Code as T;
    Some(match status.code() {
        T::NotFound | T::InvalidArgument | T::AlreadyExists | T::OutOfRange => Code::Caller,
        T::DeadlineExceeded => Code::Deadline,
        T::Unimplemented => Code::Unsupported,
        T::DataLoss => Code::Integrity,
        T::Internal => Code::Bug,
        T::Unavailable | T::Cancelled => Code::PeerLost,
        _ => Code::Retryable,
    })
}

/// What a refusal of the system says about the path or address that somebody named.
fn of_io(kind: std::io::ErrorKind) -> Code {
    use std::io::ErrorKind as K;
    match kind {
        K::NotFound
        | K::PermissionDenied
        | K::AlreadyExists
        | K::NotADirectory
        | K::IsADirectory
        | K::InvalidInput
        | K::InvalidFilename
        | K::ReadOnlyFilesystem
        | K::AddrInUse
        | K::AddrNotAvailable => Code::Caller,
        K::Unsupported => Code::Unsupported,
        K::ConnectionRefused | K::ConnectionReset | K::BrokenPipe => Code::PeerLost,
        K::TimedOut => Code::Deadline,
        _ => Code::Retryable,
    }
}

/// Prints the error on standard error, as one object under `--json`, and returns its exit code.
pub fn report(error: &anyhow::Error, json: bool) -> ExitCode {
    let code = code_of(error);
    let text = match error.downcast_ref::<tonic::Status>() {
        Some(status) => status.message().to_owned(),
        None => format!("{error:#}"),
    };
    if text.is_empty() {
        // The command has said it all.
    } else if json {
        let line =
            serde_json::json!({ "error": text, "code": format!("{code:?}"), "exit": code as u8 });
        eprintln!("{line}");
    } else {
        eprintln!("moonlive: {text}");
    }
    code.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_refuses_is_the_callers_or_passing_and_never_our_bug() {
        use anyhow::Context;
        use std::io::ErrorKind as K;
        for (kind, code) in [
            (K::NotADirectory, Code::Caller),
            (K::PermissionDenied, Code::Caller),
            (K::AddrNotAvailable, Code::Caller),
            (K::StorageFull, Code::Retryable),
            (K::Other, Code::Retryable),
        ] {
            let failed: Result<(), _> = Err(std::io::Error::from(kind));
            let error = failed.context("cannot create it").unwrap_err();
            assert_eq!(code_of(&error), code, "{kind:?}");
        }
        assert_eq!(code_of(&anyhow::anyhow!("nobody knows")), Code::Bug);
    }

    #[test]
    fn an_error_keeps_its_code_under_whatever_was_being_done() {
        use anyhow::Context;
        let error = Err::<(), _>(coded(Code::Unsupported, "no"))
            .context("the run without a migration")
            .unwrap_err();
        assert_eq!(code_of(&error), Code::Unsupported);
    }
}
