//! What an engine is started with: the model, the paged pool and the batch limits.

use crate::control_state::ProfilePolicy;
use crate::page::Scheme;
use std::path::PathBuf;
use std::time::Duration;

/// Where the weights come from.
#[derive(Debug, Clone, PartialEq)]
pub enum ModelSource {
    /// Real arithmetic on weights drawn from a seed; no download.
    Seeded {
        /// Which of the built-in shapes.
        size: SeededSize,
        /// Equal seeds give equal weights on every machine.
        seed: u64,
    },
    /// Real weights: a Llama-family GGUF file with its tokenizer.
    Gguf {
        /// The file; read once, at start.
        path: PathBuf,
    },
    /// No arithmetic: each step writes a seeded K/V row per layer, a pure function of (seed, layer,
    /// head, position, token). For benchmarks whose geometry would be too slow to compute; label
    /// what is measured with it as synthetic.
    Synthetic {
        /// Shape of the KV.
        geometry: SyntheticGeometry,
        /// Equal seeds give equal KV bytes and tokens.
        seed: u64,
        /// A step is in flight for at least this long, as it would be on a GPU.
        step_time: Duration,
    },
}

/// Built-in shapes of seeded models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SeededSize {
    /// 4 layers, width 128, 4 query and 2 kv heads of 32: for tests.
    Tiny,
    /// 8 layers, width 256, 8 query and 4 kv heads of 32.
    Small,
    /// 12 layers, width 512, 8 query and 4 kv heads of 64.
    Medium,
}

/// Shape of the KV of a [`ModelSource::Synthetic`] engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SyntheticGeometry {
    /// Decoder layers.
    pub layers: u32,
    /// KV heads per layer.
    pub kv_heads: u32,
    /// Elements of one head's K (and V).
    pub head_dim: u32,
}

impl SyntheticGeometry {
    /// Qwen2.5-7B: 28 layers, 4 kv heads, head dim 128; 56 KiB a token in bf16.
    pub const QWEN2_5_7B: Self = Self {
        layers: 28,
        kv_heads: 4,
        head_dim: 128,
    };
}

/// Element type of the KV pool. Arithmetic is f32; rows are rounded (to nearest, ties to even)
/// when they are made, so a row read back equals the row that was used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum KvDtype {
    /// 4 bytes.
    F32,
    /// 2 bytes, IEEE half.
    F16,
    /// 2 bytes, truncated exponent-preserving float.
    #[default]
    Bf16,
}

impl KvDtype {
    /// Bytes of one element.
    pub fn bytes(self) -> u32 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// Order of tokens and heads inside a block. Digests, tokens and KV bits do not depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum KvOrder {
    /// Tokens outside, heads inside.
    #[default]
    Nhd,
    /// Heads outside, tokens inside.
    Hnd,
}

/// Everything [`super::Engine::start`] needs. Start from [`EngineConfig::new`].
#[derive(Debug, Clone, PartialEq)]
pub struct EngineConfig {
    /// The weights.
    pub model: ModelSource,
    /// Element type of the pool.
    pub kv_dtype: KvDtype,
    /// Tokens per block of the pool, 1 to 256.
    pub block_tokens: u32,
    /// Order inside a block.
    pub order: KvOrder,
    /// Blocks in the pool.
    pub blocks: u32,
    /// Tokens of a canonical page (digests and migration), 1 to 256; independent of `block_tokens`.
    pub page_tokens: u16,
    /// How pages are hashed; both ends of a migration must agree.
    pub scheme: Scheme,
    /// Blocks are handed out in an order drawn from this seed (0: the pool's own order).
    pub block_shuffle_seed: u64,
    /// Most requests in one step.
    pub max_batch: usize,
    /// Most tokens in one step over all requests.
    pub max_step_tokens: usize,
    /// Most prompt tokens of one request in one step.
    pub prefill_chunk: usize,
    /// Most requests waiting for blocks; one more is refused.
    pub max_waiting: usize,
    /// Longest context (prompt + output) accepted; 0 = the model's own.
    pub max_context: u32,
    /// Threads for arithmetic, the driver included; results do not depend on it.
    pub threads: usize,
    /// Share full blocks of equal prefixes between requests.
    pub prefix_cache: bool,
    /// Whose requests this engine takes over.
    pub profile_policy: ProfilePolicy,
    /// Map the pool as a memfd, so that other processes can be given read-only access.
    pub shared_memory: bool,
    /// Have all pages of the pool present from the start, as a serving engine has: otherwise the
    /// first use of each block pays for page faults, and what migrates in pays for them all.
    pub prefault: bool,
    /// A step of the engine's own thread begins at least this long after the one before it (0: at
    /// once): streams of a small model then last as long on a fast machine as on a busy one.
    pub pace: Duration,
}

impl EngineConfig {
    /// Sensible values for `model`: bf16, blocks and pages of 16 tokens, 1,024 blocks.
    pub fn new(model: ModelSource) -> Self {
        Self {
            model,
            kv_dtype: KvDtype::Bf16,
            block_tokens: 16,
            order: KvOrder::Nhd,
            blocks: 1024,
            page_tokens: 16,
            scheme: Scheme::default(),
            block_shuffle_seed: 0,
            max_batch: 32,
            max_step_tokens: 512,
            prefill_chunk: 256,
            max_waiting: 1024,
            max_context: 0,
            threads: 1,
            prefix_cache: true,
            profile_policy: ProfilePolicy::exact(),
            shared_memory: false,
            prefault: false,
            pace: Duration::ZERO,
        }
    }

    /// The default engine of tests and of the demo: [`SeededSize::Tiny`].
    pub fn tiny(seed: u64) -> Self {
        Self::new(ModelSource::Seeded {
            size: SeededSize::Tiny,
            seed,
        })
    }
}
