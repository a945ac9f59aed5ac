//! From logits to the next token: bias, masks, penalties, filters, one draw.
//!
//! A pure function of (logits, parameters, tokens so far, draws so far), so a migrated request
//! draws what it would have drawn. Ties go to the lower token id everywhere.

use super::num::{exp64, ln64};
use super::rng::CounterRng;
use super::spec::{PenaltyScope, SamplingParams};
use std::collections::HashMap;

/// Version of everything in this file that decides a token; part of the numerics profile.
pub(crate) const VERSION: u32 = 1;

/// The steps in the order they run, as ControlStateV1 field 9 lists them.
pub(crate) const ORDER: [u16; 8] = [
    0, // logit bias
    1, // masks: allowed tokens, bad words, minimum length, grammar
    2, // penalties
    3, // temperature
    4, // top-k
    5, // typical-p
    6, // top-p
    7, // min-p
];

/// Tokens less likely than the best by this factor are never drawn: it bounds the sort.
const NEGLIGIBLE: f64 = 1e-8;

/// What the draw depends on besides the logits.
pub(crate) struct Context<'a> {
    pub prompt: &'a [u32],
    pub output: &'a [u32],
    /// Tokens that may not be drawn now (too early to end).
    pub banned: &'a [u32],
    /// Bit t: token t is allowed by the grammar. `None`: all are.
    pub mask: Option<&'a [u64]>,
    /// Drawn if nothing else is allowed.
    pub fallback: u32,
}

/// Draws one token. `logits` is scratch afterwards.
pub(crate) fn sample(
    params: &SamplingParams,
    context: &Context<'_>,
    logits: &mut [f32],
    rng: &mut CounterRng,
) -> u32 {
    for (token, bias) in &params.logit_bias {
        if let Some(l) = logits.get_mut(*token as usize) {
            *l += bias;
        }
    }
    mask(params, context, logits);
    penalize(params, context, logits);
    let Some(best) = argmax(logits) else {
        return context.fallback;
    };
    if params.temperature <= 0.0 {
        return best;
    }
    let candidates = filter(params, logits, best);
    let total: f64 = candidates.iter().map(|c| c.1).sum();
    let target = rng.uniform() * total;
    let mut reached = 0.0;
    for (token, p) in &candidates {
        reached += p;
        if reached > target {
            return *token;
        }
    }
    candidates.last().map_or(best, |c| c.0)
}

/// The token of the largest logit; `None` if none is above minus infinity.
pub(crate) fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best = None;
    let mut most = f32::NEG_INFINITY;
    for (token, l) in logits.iter().enumerate() {
        if *l > most {
            most = *l;
            best = Some(token as u32);
        }
    }
    best
}

fn mask(params: &SamplingParams, context: &Context<'_>, logits: &mut [f32]) {
    let mut ban = |token: u32| {
        if let Some(l) = logits.get_mut(token as usize) {
            *l = f32::NEG_INFINITY;
        }
    };
    context.banned.iter().for_each(|t| ban(*t));
    for word in &params.bad_words {
        if let Some((last, start)) = word.split_last()
            && context.output.ends_with(start)
        {
            ban(*last);
        }
    }
    if let Some(allowed) = &params.allowed_tokens {
        let mut next = allowed.iter().peekable();
        for (token, l) in logits.iter_mut().enumerate() {
            if next.peek().is_some_and(|t| **t as usize == token) {
                next.next();
            } else {
                *l = f32::NEG_INFINITY;
            }
        }
    }
    if let Some(bits) = context.mask {
        for (token, l) in logits.iter_mut().enumerate() {
            if bits[token / 64] >> (token % 64) & 1 == 0 {
                *l = f32::NEG_INFINITY;
            }
        }
    }
}

fn penalize(params: &SamplingParams, context: &Context<'_>, logits: &mut [f32]) {
    let SamplingParams {
        repetition_penalty: repetition,
        frequency_penalty: frequency,
        presence_penalty: presence,
        ..
    } = *params;
    if repetition == 1.0 && frequency == 0.0 && presence == 0.0 {
        return;
    }
    let (prompt, output) = match params.penalty_scope {
        PenaltyScope::PromptAndOutput => (context.prompt, context.output),
        PenaltyScope::OutputOnly => (&[][..], context.output),
        PenaltyScope::Window => {
            let all = context.prompt.len() + context.output.len();
            let window = usize::try_from(params.penalty_window)
                .unwrap_or(all)
                .min(all);
            let of_output = window.min(context.output.len());
            let of_prompt = window - of_output;
            (
                &context.prompt[context.prompt.len() - of_prompt..],
                &context.output[context.output.len() - of_output..],
            )
        }
    };
    let mut counts: HashMap<u32, u32> = HashMap::new();
    if repetition != 1.0 || params.penalty_scope == PenaltyScope::Window {
        // Repetition looks at the prompt too; frequency and presence only in a window.
        let weight = u32::from(params.penalty_scope == PenaltyScope::Window);
        prompt
            .iter()
            .for_each(|t| *counts.entry(*t).or_default() += weight);
    }
    output
        .iter()
        .for_each(|t| *counts.entry(*t).or_default() += 1);
    // Each token is changed on its own, so the map's order does not matter.
    for (token, count) in counts {
        let Some(l) = logits.get_mut(token as usize) else {
            continue;
        };
        if *l > 0.0 {
            *l /= repetition;
        } else {
            *l *= repetition;
        }
        *l -= frequency * count as f32;
        if count > 0 {
            *l -= presence;
        }
    }
}

/// The tokens that may be drawn, most likely first, with weights that need not sum to one.
fn filter(params: &SamplingParams, logits: &[f32], best: u32) -> Vec<(u32, f64)> {
    let scale = 1.0 / f64::from(params.temperature);
    let max = f64::from(logits[best as usize]);
    let mut candidates: Vec<(u32, f64)> = logits
        .iter()
        .enumerate()
        .filter_map(|(token, l)| {
            let p = exp64((f64::from(*l) - max) * scale);
            (p >= NEGLIGIBLE).then_some((token as u32, p))
        })
        .collect();
    if candidates.is_empty() {
        // The best logit is infinite or not a number.
        return vec![(best, 1.0)];
    }
    let likelier = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    let k = params.top_k as usize;
    if k > 0 && k < candidates.len() {
        candidates.select_nth_unstable_by(k - 1, likelier);
        candidates.truncate(k);
    }
    candidates.sort_unstable_by(likelier);
    if params.typical_p < 1.0 {
        typical(params.typical_p, &mut candidates);
        candidates.sort_unstable_by(likelier);
    }
    if params.top_p < 1.0 {
        let total: f64 = candidates.iter().map(|c| c.1).sum();
        let n = enough(&candidates, f64::from(params.top_p) * total);
        candidates.truncate(n);
    }
    if params.min_p > 0.0 {
        let least = candidates[0].1 * f64::from(params.min_p);
        let n = candidates.partition_point(|c| c.1 >= least);
        candidates.truncate(n.max(1));
    }
    candidates
}

/// Keeps the tokens whose surprise is nearest to the expected one until they reach `p`.
fn typical(p: f32, candidates: &mut Vec<(u32, f64)>) {
    let total: f64 = candidates.iter().map(|c| c.1).sum();
    let surprise = |w: f64| -ln64(w / total);
    let expected: f64 = candidates.iter().map(|c| c.1 / total * surprise(c.1)).sum();
    candidates.sort_unstable_by(|a, b| {
        let far = |c: &(u32, f64)| (surprise(c.1) - expected).abs();
        far(a).total_cmp(&far(b)).then(a.0.cmp(&b.0))
    });
    let n = enough(candidates, f64::from(p) * total);
    candidates.truncate(n);
}

/// How many first candidates reach `mass`; at least one.
fn enough(candidates: &[(u32, f64)], mass: f64) -> usize {
    let mut reached = 0.0;
    for (i, c) in candidates.iter().enumerate() {
        reached += c.1;
        if reached >= mass {
            return i + 1;
        }
    }
    candidates.len().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(params: &SamplingParams, logits: &[f32], output: &[u32], draws: u64) -> u32 {
        let context = Context {
            prompt: &[0],
            output,
            banned: &[],
            mask: None,
            fallback: 9,
        };
        let mut rng = CounterRng { seed: 1, draws };
        sample(params, &context, &mut logits.to_vec(), &mut rng)
    }

    fn reachable(params: &SamplingParams, logits: &[f32]) -> Vec<u32> {
        let mut seen: Vec<u32> = (0..2000).map(|d| draw(params, logits, &[], d)).collect();
        seen.sort_unstable();
        seen.dedup();
        seen
    }

    const LOGITS: [f32; 6] = [1.0, 3.0, 3.0, 2.0, -1.0, 0.5];

    #[test]
    fn greedy_takes_the_first_of_the_best_and_makes_no_draw() {
        assert_eq!(draw(&SamplingParams::default(), &LOGITS, &[], 0), 1);
    }

    #[test]
    fn filters_leave_what_they_say() {
        let on = SamplingParams {
            temperature: 1.0,
            ..Default::default()
        };
        assert_eq!(reachable(&on, &LOGITS), [0, 1, 2, 3, 4, 5]);
        let k = SamplingParams {
            top_k: 3,
            ..on.clone()
        };
        assert_eq!(reachable(&k, &LOGITS), [1, 2, 3]);
        let p = SamplingParams {
            top_p: 0.7,
            ..on.clone()
        };
        assert_eq!(reachable(&p, &LOGITS), [1, 2]);
        let min = SamplingParams {
            min_p: 0.3,
            ..on.clone()
        };
        assert_eq!(reachable(&min, &LOGITS), [1, 2, 3]);
        let typical = SamplingParams {
            typical_p: 0.5,
            ..on.clone()
        };
        assert!(reachable(&typical, &LOGITS).len() < 4);
        let allowed = SamplingParams {
            allowed_tokens: Some([4, 5].into()),
            ..on.clone()
        };
        assert_eq!(reachable(&allowed, &LOGITS), [4, 5]);
        let none = SamplingParams {
            allowed_tokens: Some([77].into()),
            ..on
        };
        assert_eq!(reachable(&none, &LOGITS), [9]);
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let on = SamplingParams {
            temperature: 1.0,
            ..Default::default()
        };
        let logits = [0.0, ln64(3.0) as f32];
        let ones = (0..40_000)
            .filter(|d| draw(&on, &logits, &[], *d) == 1)
            .count();
        assert!((29_500..30_500).contains(&ones), "{ones}");
    }

    #[test]
    fn penalties_look_where_their_scope_says() {
        let scope = |penalty_scope, penalty_window| SamplingParams {
            presence_penalty: 5.0,
            penalty_scope,
            penalty_window,
            ..Default::default()
        };
        let all = scope(PenaltyScope::PromptAndOutput, -1);
        assert_eq!(draw(&all, &LOGITS, &[1], 0), 2);
        let repetition = SamplingParams {
            repetition_penalty: 10.0,
            ..Default::default()
        };
        assert_eq!(
            draw(&repetition, &[3.0, 2.0], &[], 0),
            1,
            "the prompt counts"
        );
        let output = SamplingParams {
            penalty_scope: PenaltyScope::OutputOnly,
            ..repetition
        };
        assert_eq!(draw(&output, &[3.0, 2.0], &[], 0), 0, "the prompt does not");
        let last = scope(PenaltyScope::Window, 1);
        assert_eq!(
            draw(&last, &LOGITS, &[1, 2], 0),
            1,
            "1 is out of the window"
        );
        assert_eq!(draw(&scope(PenaltyScope::Window, 0), &LOGITS, &[1], 0), 1);
    }

    #[test]
    fn bad_words_are_broken_at_their_last_token() {
        let params = SamplingParams {
            bad_words: vec![vec![5, 1], vec![2]],
            ..Default::default()
        };
        assert_eq!(draw(&params, &LOGITS, &[], 0), 1);
        assert_eq!(draw(&params, &LOGITS, &[5], 0), 3);
    }
}
