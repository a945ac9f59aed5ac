//! The closed enums of the codec. The numbers are the wire's; a value not listed is refused.

/// The kind of random generator behind sampling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u16)]
pub enum RngKind {
    /// None: the most likely token is taken.
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
