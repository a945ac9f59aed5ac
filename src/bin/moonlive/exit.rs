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

fn code_of(error: &anyhow::Error) -> Code {
    if let Some(coded) = error.downcast_ref::<Coded>() {
        return coded.code;
    }
    if let Some(e) = error.downcast_ref::<moonlivekv::rpc::DialError>() {
        return e.kind().into();
    }
    if let Some(e) = error.downcast_ref::<moonlivekv::rpc::ServeError>() {
        return e.kind().into();
    }
    if let Some(status) = error.downcast_ref::<tonic::Status>() {
        use tonic::Code as T;
        return match status.code() {
            T::NotFound | T::InvalidArgument | T::AlreadyExists | T::OutOfRange => Code::Caller,
            T::DeadlineExceeded => Code::Deadline,
            T::Unimplemented => Code::Unsupported,
            T::DataLoss => Code::Integrity,
            T::Internal => Code::Bug,
            T::Unavailable | T::Cancelled => Code::PeerLost,
            _ => Code::Retryable,
        };
    }
    Code::Bug
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
