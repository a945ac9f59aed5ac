//! What can be wrong with a layout, a header, a view or a plan. Every variant names a cause.

use crate::id::ErrorKind;

/// Features that are refused by type instead of being tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unsupported {
    /// A ring whose slots are overwritten: a written slot does not stay.
    #[error("circular-buffer KV: slots are overwritten, so no page of it can be sealed")]
    CircularBuffer,
    /// Mamba / linear attention state: one mutable blob, not pages.
    #[error(
        "mutable per-request state: it has no pages; only an adapter that moves it inside the fence can"
    )]
    MutableState,
    /// Per-page re-quantization: writing a token may rewrite earlier slots of its page.
    #[error("per-page re-quantization rewrites tail slots: such a group cannot be pre-copied")]
    RewritesTail,
    /// A tag this build does not know; a newer peer wrote it.
    #[error(
        "unknown KV kind tag {0}: the peer is newer than this build, or the bytes are not a header"
    )]
    KvKind(u8),
    /// A tag this build does not know; a newer peer wrote it.
    #[error(
        "unknown dtype tag {0}: the peer is newer than this build, or the bytes are not a header"
    )]
    Dtype(u8),
    /// A tag this build does not know; a newer peer wrote it.
    #[error(
        "unknown digest scheme tag {0}: the peer is newer than this build, or the bytes are not a header"
    )]
    Scheme(u8),
    /// A format version this build does not know.
    #[error("unknown format version {0}: the peer is newer than this build")]
    Version(u8),
    /// The rows of one block fall into more separate pieces than we track.
    #[error("one block lies in more than {max} separate pieces: no engine lays KV out so; check the strides", max = crate::page::MAX_PIECES)]
    TooScattered,
}

/// Errors of this room. Nothing here is retryable: the same arguments fail again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PageError {
    /// Something this build refuses to move.
    #[error("unsupported: {0}")]
    Unsupported(#[from] Unsupported),
    /// A count or size that must be at least 1.
    #[error("{what} is zero")]
    Zero {
        /// Which one.
        what: &'static str,
    },
    /// A count or size above its bound.
    #[error("{what} is {got}, above the bound {max}")]
    TooLarge {
        /// Which one.
        what: &'static str,
        /// The value given.
        got: u64,
        /// The largest one accepted.
        max: u64,
    },
    /// A list of ids that must be strictly ascending is not.
    #[error("{what} are not strictly ascending at position {at}")]
    NotAscending {
        /// Which list.
        what: &'static str,
        /// Index of the first offender.
        at: usize,
    },
    /// A kind and its sizes contradict each other.
    #[error("geometry contradicts itself: {0}")]
    Geometry(&'static str),
    /// A layer or head of a shard that the geometry does not have.
    #[error("{what} {id} is not in the geometry")]
    NotInGeometry {
        /// `layer` or `head`.
        what: &'static str,
        /// The id.
        id: u32,
    },
    /// A layer, head or component that this shard or group does not hold.
    #[error("{what} {id} is not in this shard")]
    NotInShard {
        /// `layer`, `head` or `component`.
        what: &'static str,
        /// The id.
        id: u32,
    },
    /// No given source holds a leaf that the destination needs.
    #[error("no source holds layer {layer} head {head}")]
    MissingLeaf {
        /// Global layer id.
        layer: u32,
        /// Global KV head id.
        head: u32,
    },
    /// An offset or size does not fit in 64 bits.
    #[error("offset arithmetic overflows 64 bits: the strides or counts are wrong")]
    Overflow,
    /// Two rows of the pool share bytes.
    #[error("strides overlap: bytes at offset {offset} belong to two rows")]
    Overlap {
        /// First shared byte found, relative to the region.
        offset: u64,
    },
    /// The layout reaches past its region.
    #[error("layout ends at byte {end}, region has {len}")]
    OutOfRegion {
        /// One past the last byte the layout uses.
        end: u64,
        /// Region length.
        len: u64,
    },
    /// Number of planes given does not fit the shard.
    #[error("{got} planes given, this shard has {want}")]
    PlaneCount {
        /// Given.
        got: usize,
        /// Layers of the shard times components of the geometry.
        want: usize,
    },
    /// An axis order that is not a permutation of the five axes.
    #[error("axes must name Layer, Kv, Block, Head and Slot once each")]
    Axes,
    /// A block id past the pool's end (an id of another pool, or a virtual id).
    #[error("block {block} is not in this pool of {blocks} blocks")]
    BlockOutOfRange {
        /// The id.
        block: u32,
        /// Blocks in the pool.
        blocks: u32,
    },
    /// A slot past the end of its block.
    #[error("slot {slot} is not in a block of {block_tokens} tokens")]
    SlotOutOfRange {
        /// The slot.
        slot: u32,
        /// Tokens of a block.
        block_tokens: u32,
    },
    /// A block id named twice by a table that will be written.
    #[error("block {block} stands twice in the destination's table")]
    DuplicateBlock {
        /// The id.
        block: u32,
    },
    /// Tokens that the block table does not cover.
    #[error("tokens {from}..{to} are not covered by this view of {have_from}..{have_to}")]
    TokensNotCovered {
        /// Wanted, first.
        from: u64,
        /// Wanted, one past the last.
        to: u64,
        /// Covered, first.
        have_from: u64,
        /// Covered, one past the last.
        have_to: u64,
    },
    /// Source and destination do not describe the same group of the same model.
    #[error(
        "source and destination have different geometries; only layouts of the same model and group can be planned"
    )]
    GeometryMismatch,
    /// A page number past what fits.
    #[error("page {page} of this object set does not exist")]
    NoSuchPage {
        /// Page index.
        page: u64,
    },
    /// A group id the header does not have.
    #[error("the header has no group {group}")]
    NoSuchGroup {
        /// The id.
        group: u16,
    },
    /// Bytes end inside a field.
    #[error("truncated: {what} needs {need} more bytes")]
    Truncated {
        /// Field being read.
        what: &'static str,
        /// Bytes missing.
        need: usize,
    },
    /// Bytes after the end of the message.
    #[error("{extra} bytes after the end")]
    Trailing {
        /// How many.
        extra: usize,
    },
    /// The first bytes are not ours.
    #[error("not a {what}: wrong magic")]
    Magic {
        /// What was expected.
        what: &'static str,
    },
    /// A field that must have one value in this form has another: the encoding would not be unique.
    #[error("{what} is not in canonical form")]
    NotCanonical {
        /// Which field.
        what: &'static str,
    },
    /// Memory that must be readable (or writable) through the given access is not.
    #[error(
        "bytes {offset}..+{len} cannot be reached through this access: the lease does not cover them"
    )]
    Unreachable {
        /// Offset in the region.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A caller's buffer has the wrong length.
    #[error("{what} has {got} bytes or entries, needs {want}")]
    BufferLen {
        /// Which buffer.
        what: &'static str,
        /// Given.
        got: usize,
        /// Needed.
        want: usize,
    },
}

impl PageError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Unsupported(_) => ErrorKind::Unsupported,
            _ => ErrorKind::Caller,
        }
    }
}
