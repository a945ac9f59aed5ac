//! The closed enums of the codec. The numbers are the wire's; a value not listed is refused.

/// The kind of random generator behind sampling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(u16)]
pub enum RngKind {
    /// None: the most likely token is taken.
    #[default]
    Greedy = 0,
    /// Counter-based: draw n is a function of (seed, n).
    Counter = 1,
    /// vLLM's Murmur-hashed per-request noise.
    VllmMurmur = 2,
    /// SGLang's Murmur-hashed per-request noise (deterministic inference).
    SglangMurmur = 3,
    /// A `torch.Generator`; its state travels as bytes.
    TorchGenerator = 4,
    /// Mersenne Twister; its state travels as bytes.
    Mt19937 = 5,
}

impl RngKind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Self; 6] = [
        Self::Greedy,
        Self::Counter,
        Self::VllmMurmur,
        Self::SglangMurmur,
        Self::TorchGenerator,
        Self::Mt19937,
    ];
}

/// Which tokens the penalties look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(u16)]
pub enum PenaltySemantics {
    /// Prompt and output.
    #[default]
    PromptAndOutput = 0,
    /// Output only.
    OutputOnly = 1,
    /// The last `penalty_window` tokens.
    Window = 2,
}

impl PenaltySemantics {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::PromptAndOutput, Self::OutputOnly, Self::Window];
}

/// What each message to the client holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(u8)]
pub enum OutputKind {
    /// All text so far.
    Cumulative = 0,
    /// What is new.
    #[default]
    Delta = 1,
    /// Nothing until the end, then all of it.
    FinalOnly = 2,
}

impl OutputKind {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::Cumulative, Self::Delta, Self::FinalOnly];
}
