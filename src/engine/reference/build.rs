//! Puts an engine together from its configuration.

use super::blocks::Blocks;
use super::config::{EngineConfig, KvDtype, KvOrder, ModelSource};
use super::identity::{ModelInfo, fingerprint, model_digest};
use super::model::{Model, Synthetic, seeded_llama};
use super::num::Threads;
use super::tokenizer::{Encoder, Vocabulary, toy};
use super::{EngineError, gguf};
use crate::control_state::Fingerprint;
use crate::digest::Digester;
use crate::mem::{BlockPool, Region};
use crate::page::{
    BlockLayout, Dtype, GroupGeometry, KvSplit, LayoutSpec, Major, ObjectSetHeader, Order, Scheme,
};
use std::sync::Arc;

/// What a model source brings.
pub(crate) struct Loaded {
    pub model: Box<dyn Model>,
    pub vocabulary: Arc<Vocabulary>,
    pub encoder: Box<dyn Encoder>,
    pub name: String,
    pub digest: [u8; 32],
}

/// The fixed parts of an engine.
pub(crate) struct Parts {
    pub model: Box<dyn Model>,
    pub info: ModelInfo,
    pub vocabulary: Arc<Vocabulary>,
    pub encoder: Box<dyn Encoder>,
    pub pool: Arc<BlockPool>,
    pub layout: Arc<BlockLayout>,
    pub digester: Arc<Digester>,
    pub fingerprint: Fingerprint,
}

/// Context of models that set none themselves, in tokens.
const TOY_CONTEXT: usize = 16 << 10;
/// Longest context that may be asked for.
const MAX_CONTEXT: usize = 1 << 20;

/// Checks the configuration, loads the model, maps the pool.
pub(crate) fn build(config: &EngineConfig) -> Result<(Parts, Blocks), EngineError> {
    check(config)?;
    let threads = Threads::new(config.threads).map_err(EngineError::Config)?;
    let loaded = load(config, threads)?;
    let shape = loaded.model.shape();
    let pool = |e: crate::mem::MemError| EngineError::Pool(e.to_string());
    let page = |e: crate::page::PageError| EngineError::Config(e.to_string());

    let dtype = match config.kv_dtype {
        KvDtype::F32 => Dtype::F32,
        KvDtype::F16 => Dtype::F16,
        KvDtype::Bf16 => Dtype::Bf16,
    };
    let geometry = Arc::new(
        GroupGeometry::attention(
            super::kvlog::GROUP,
            0..shape.layers as u32,
            shape.kv_heads as u32,
            shape.head_dim as u32,
            dtype,
        )
        .map_err(page)?,
    );
    let order = match config.order {
        KvOrder::Nhd => Order::Nhd,
        KvOrder::Hnd => Order::Hnd,
    };
    let layout = LayoutSpec::new(
        Major::Block,
        KvSplit::InBlock,
        order,
        config.block_tokens,
        config.blocks,
    )
    .build(&geometry, geometry.whole())
    .map_err(page)?;
    if config.prefault {
        fits(layout.region_len(), available())?;
    }
    let mut region = if config.shared_memory {
        Region::memfd("moonlive-kv", layout.region_len())
    } else {
        Region::anonymous(layout.region_len())
    }
    .map_err(pool)?;
    if config.prefault {
        region.prefault().map_err(pool)?;
    }
    let blocks = BlockPool::new(region, config.blocks, |b| {
        // Every block below `blocks` has extents.
        layout.extents(b).into_iter().flatten().collect::<Vec<_>>()
    })
    .map_err(pool)?;
    let ledger = Blocks::new(
        blocks.clone(),
        config.block_tokens as usize,
        config.block_shuffle_seed,
    )
    .map_err(pool)?;
    let header = ObjectSetHeader::new(
        loaded.digest,
        vec![geometry.as_ref().clone()],
        config.page_tokens,
        config.scheme,
    )
    .map_err(page)?;
    let digester = Digester::new(header).map_err(|e| EngineError::Config(e.to_string()))?;
    let info = ModelInfo {
        name: loaded.name,
        model: loaded.digest,
        weights_version: 1,
        tokenizer: loaded.vocabulary.digest(),
        vocab: shape.vocab,
        max_context: shape.max_context as u32,
        layers: shape.layers as u32,
        kv_heads: shape.kv_heads as u32,
        head_dim: shape.head_dim as u32,
        token_bytes: shape.token_bytes(config.kv_dtype) as u64,
        synthetic: matches!(config.model, ModelSource::Synthetic { .. }),
        eos: loaded.vocabulary.eos.clone(),
    };
    let parts = Parts {
        model: loaded.model,
        info,
        vocabulary: loaded.vocabulary,
        encoder: loaded.encoder,
        pool: blocks,
        layout: Arc::new(layout),
        digester: Arc::new(digester),
        fingerprint: fingerprint(config),
    };
    Ok((parts, ledger))
}

/// Memory that can be had without swapping, in bytes; `None` where the system does not tell.
fn available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib << 10)
}

/// A pool whose pages are all made present must fit: nobody is told otherwise, the kernel ends some
/// process instead.
fn fits(pool: u64, available: Option<u64>) -> Result<(), EngineError> {
    match available {
        Some(have) if pool > have => Err(EngineError::Config(format!(
            "the KV pool takes {} MiB and {} MiB of memory are available: fewer blocks, smaller \
             blocks or a smaller model",
            pool >> 20,
            have >> 20
        ))),
        _ => Ok(()),
    }
}

fn check(config: &EngineConfig) -> Result<(), EngineError> {
    let bad = |what: &str| Err(EngineError::Config(what.to_string()));
    if config.blocks == 0 || config.block_tokens == 0 {
        return bad("blocks and block_tokens must be at least 1");
    }
    if config.max_batch == 0 || config.max_step_tokens == 0 || config.prefill_chunk == 0 {
        return bad("max_batch, max_step_tokens and prefill_chunk must be at least 1");
    }
    if config.threads == 0 || config.threads > 256 {
        return bad("threads must be 1 to 256");
    }
    if config.max_context as usize > MAX_CONTEXT {
        return bad("max_context must be at most 1,048,576");
    }
    if config.scheme == Scheme::Sha256Flat {
        return bad("sha256-flat hashes no growing tail; use blake3-leaves or sha256-leaves");
    }
    Ok(())
}

fn load(config: &EngineConfig, threads: Threads) -> Result<Loaded, EngineError> {
    let own = config.max_context as usize;
    let context = if own == 0 { TOY_CONTEXT } else { own };
    let toy = |model: Box<dyn Model>, name: String, heads: usize, weights: &str| Loaded {
        digest: model_digest(&model.shape(), heads, weights.as_bytes()),
        model,
        vocabulary: Arc::new(toy::vocabulary()),
        encoder: Box::new(toy::ToyEncoder::new()),
        name,
    };
    match &config.model {
        ModelSource::Seeded { size, seed } => {
            let model = seeded_llama(*size, *seed, config.kv_dtype, context, threads);
            let heads = model.heads();
            let name = format!("seeded-{size:?}").to_lowercase();
            let weights = format!("seeded {seed}");
            Ok(toy(Box::new(model), name, heads, &weights))
        }
        ModelSource::Synthetic {
            geometry,
            seed,
            step_time,
        } => {
            let dtype = config.kv_dtype;
            let context = if own == 0 { MAX_CONTEXT } else { own };
            let model = Synthetic::new(*geometry, *seed, *step_time, dtype, context, threads);
            let weights = format!("synthetic {seed}");
            Ok(toy(Box::new(model), "synthetic".into(), 0, &weights))
        }
        ModelSource::Gguf { path } => {
            let read = gguf::load(path, config.kv_dtype, own, threads)?;
            let heads = read.model.heads();
            Ok(Loaded {
                digest: model_digest(&read.model.shape(), heads, &read.digest),
                model: Box::new(read.model),
                vocabulary: Arc::new(read.vocabulary),
                encoder: Box::new(read.encoder),
                name: read.name,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_that_memory_cannot_hold_is_refused_before_it_is_touched() {
        assert!(available().is_some_and(|n| n > 1 << 20));
        assert!(fits(1 << 30, Some(1 << 30)).is_ok() && fits(u64::MAX, None).is_ok());
        // 256 million blocks of 16 KiB.
        let mut config = EngineConfig::tiny(1);
        config.blocks = 1 << 28;
        config.prefault = true;
        let refused = build(&config).map(drop).unwrap_err();
        assert!(
            matches!(&refused, EngineError::Config(why) if why.contains("fewer blocks")),
            "{refused}"
        );
    }

    #[test]
    fn threads_are_bounded_at_both_ends() {
        for threads in [0, 257] {
            let mut config = EngineConfig::tiny(1);
            config.threads = threads;
            let refused = build(&config).map(drop).unwrap_err();
            assert_eq!(refused.kind(), crate::id::ErrorKind::Caller, "{refused}");
        }
    }
}
