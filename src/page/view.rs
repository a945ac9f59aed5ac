//! Tokens of one request as they lie in one pool: a layout, a block table, a token range.

use std::ops::Range;

use super::{BlockLayout, PageError};

/// Tokens `tokens` of a request in a pool: token `t` lies in block
/// `table[t / block_tokens - first_block]`, slot `t % block_tokens`.
///
/// Cheap to make; it borrows the engine's own block table, so what is hashed is what will be read.
#[derive(Debug, Clone)]
pub struct TokenView<'a> {
    layout: &'a BlockLayout,
    table: &'a [u32],
    first_block: u64,
    tokens: Range<u64>,
}

impl<'a> TokenView<'a> {
    /// `table[0]` is the block of token `tokens.start`, that is, logical block
    /// `tokens.start / block_tokens`; the table must reach `tokens.end`.
    ///
    /// Errors if it does not, or if it names a block that the pool does not have.
    pub fn new(
        layout: &'a BlockLayout,
        table: &'a [u32],
        tokens: Range<u64>,
    ) -> Result<Self, PageError> {
        let bt = u64::from(layout.block_tokens());
        let first_block = tokens.start / bt;
        let have_to = (table.len() as u64)
            .checked_add(first_block)
            .and_then(|b| b.checked_mul(bt))
            .ok_or(PageError::Overflow)?;
        if tokens.end < tokens.start || tokens.end > have_to {
            return Err(PageError::TokensNotCovered {
                from: tokens.start,
                to: tokens.end,
                have_from: first_block * bt,
                have_to,
            });
        }
        table.iter().try_for_each(|&b| layout.check_block(b))?;
        Ok(Self {
            layout,
            table,
            first_block,
            tokens,
        })
    }

    /// One canonical page of a packed layout with one block, as the request's page `page`.
    pub(super) fn page(
        layout: &'a BlockLayout,
        page: u32,
        page_tokens: u16,
        tokens: &Range<u64>,
    ) -> Result<Self, PageError> {
        let first = u64::from(page) * u64::from(page_tokens);
        let within = tokens.start >= first && tokens.end <= first + u64::from(page_tokens);
        if !within || layout.block_tokens() != u32::from(page_tokens) {
            return Err(PageError::NoSuchPage { page: page.into() });
        }
        Ok(Self {
            layout,
            table: &[0],
            first_block: page.into(),
            tokens: tokens.clone(),
        })
    }

    /// The pool's layout.
    pub fn layout(&self) -> &'a BlockLayout {
        self.layout
    }

    /// The tokens this view covers.
    pub fn tokens(&self) -> Range<u64> {
        self.tokens.clone()
    }

    /// The block table, from the block of the first token.
    pub fn table(&self) -> &'a [u32] {
        self.table
    }

    /// Block and slot of token `t`.
    pub fn place(&self, t: u64) -> Result<(u32, u32), PageError> {
        self.check(&(t..t.checked_add(1).ok_or(PageError::Overflow)?))?;
        Ok(self.place_unchecked(t))
    }

    /// The blocks that hold `tokens`, in order: what a lease for them must cover.
    pub fn blocks_of(&self, tokens: Range<u64>) -> Result<&'a [u32], PageError> {
        self.check(&tokens)?;
        if tokens.is_empty() {
            return Ok(&[]);
        }
        let bt = u64::from(self.layout.block_tokens());
        let from = tokens.start / bt - self.first_block;
        let to = (tokens.end - 1) / bt - self.first_block;
        Ok(&self.table[from as usize..=to as usize])
    }

    /// That `tokens` lies inside this view.
    pub(crate) fn check(&self, tokens: &Range<u64>) -> Result<(), PageError> {
        let ok = tokens.start <= tokens.end
            && tokens.start >= self.tokens.start
            && tokens.end <= self.tokens.end;
        if ok {
            return Ok(());
        }
        Err(PageError::TokensNotCovered {
            from: tokens.start,
            to: tokens.end,
            have_from: self.tokens.start,
            have_to: self.tokens.end,
        })
    }

    /// As [`place`](Self::place) for a token already checked.
    pub(crate) fn place_unchecked(&self, t: u64) -> (u32, u32) {
        let bt = u64::from(self.layout.block_tokens());
        (
            self.table[(t / bt - self.first_block) as usize],
            (t % bt) as u32,
        )
    }
}
