//! Dispatches around the cache: heads before attention, appends, attention.

use model::plan::{Buf, Cache, CacheDecl, RopePairing, Rows, Weight};

use super::super::sources::{self, Source};
use super::super::{fuse, variants};
use super::{CacheView, Draft, Lower, Ranks, float, is, per_row, simdgroups};
use crate::commands::Use;
use crate::commands::node::{Count, Extent, Place, THREADS, When, Word};
use crate::commands::tables::Table;
use backend::{CacheType, KvType};

/// Steps with a sequence of more positions than these.
fn more_than(n: usize) -> When {
    When { count: Count::Reach { below: usize::MAX }, from: n + 1, to: usize::MAX }
}

impl Lower<'_> {
    /// Norms of heads, rotary embeddings and the append behind them.
    pub(super) fn heads_in(&mut self, run: &fuse::Heads, split: Option<fuse::Split>) {
        let (view, pages) = self.cache(run.cache);
        let CacheDecl { n_kv, d_k, d_v, window, .. } = view.decl;
        let norm = |part: Option<fuse::Part>| match part.and_then(|part| part.norm) {
            None => 0,
            Some(None) => 1,
            Some(Some(_)) => 2,
        };
        let is_turned = |part: Option<fuse::Part>| usize::from(part.is_some_and(|part| part.is_rotated));
        let (k, parts) = (Some(run.k), [run.q, Some(run.k), run.v]);
        let mut draft = self
            .cached(sources::HEADS, "heads")
            .define("D_K", d_k)
            .define("D_V", d_v)
            .define("HAS_Q", usize::from(run.q.is_some()))
            .define("HAS_V", usize::from(run.v.is_some()))
            .define("Q_NORM", norm(run.q))
            .define("K_NORM", norm(k))
            .define("V_NORM", norm(run.v))
            .define("Q_ROPE", is_turned(run.q))
            .define("K_ROPE", is_turned(k))
            .bind(2, self.buf_as(run.k.x, Use::Update))
            .bind(3, (Place::Fixed(view.k), Use::Update));
        if let Some(q) = run.q {
            let used = if split.is_some() { Use::Write } else { Use::Update };
            draft = draft.define("HAS_GATE", usize::from(split.is_some())).bind(1, self.buf_as(q.x, used));
        }
        if let Some(fuse::Split { x, gate }) = split {
            draft = draft.bind(14, self.buf_as(x, Use::Read)).bind(15, self.buf_as(gate, Use::Write));
        }
        if let (Some(v), Some(cache)) = (run.v, view.v) {
            draft = draft.bind(4, self.buf_as(v.x, Use::Read)).bind(5, (Place::Fixed(cache), Use::Update));
        }
        for (slot, part) in (6..).zip(parts) {
            if let Some(w) = part.and_then(|part| part.norm).flatten() {
                draft = draft.bind(slot, self.vector(w));
            }
        }
        let (mut half, mut interleaved) = (0, false);
        if let Some(rope) = run.rope {
            let decl = self.plan.rope(rope);
            (half, interleaved) = (decl.inv_freq.len(), decl.pairing == RopePairing::Interleaved);
            draft = draft.table(9, Table::Angles(rope.0 as usize));
        }
        let n_q = run.q.map_or(0, |q| self.width(q.x) / d_k);
        let n_heads = n_q * (1 + usize::from(split.is_some())) + n_kv * (1 + usize::from(run.v.is_some()));
        let words = [n_q, n_kv, usize::from(window.is_some()), half, usize::from(interleaved)];
        self.push(
            draft
                .params(0, words.into_iter().map(is).chain([float(run.eps)]))
                .table(10, Table::Positions)
                .table(11, Table::ChunkOf)
                .table(12, Table::Chunks)
                .table(13, pages)
                .grid([simdgroups(n_heads), per_row(Rows::Tokens), Extent::Is(1)]),
        );
    }

    /// Keys of a latent cache with the query's own norm beside them, then heads of queries, then these in the latent's
    /// terms.
    pub(super) fn latent(&mut self, run: &fuse::Latent) {
        let (view, pages) = self.cache(run.cache);
        let [n_latent, n_turned] = run.d_kv;
        let decl = self.plan.rope(run.rope);
        let pairs = [decl.inv_freq.len(), usize::from(decl.pairing == RopePairing::Interleaved)];
        let words = [n_latent, n_turned, pairs[0], pairs[1], usize::from(view.decl.window.is_some())];
        let mut numbers = vec![float(run.eps)];
        self.op = "latent";
        let mut draft = self
            .cached(sources::LATENT_IN, "latent_in")
            .define("D_K", view.decl.d_k)
            .define("HAS_Q", usize::from(run.low.is_some()))
            .bind(0, self.buf_as(run.kv, Use::Read))
            .bind(1, self.vector(run.norm_w))
            .bind(2, (Place::Fixed(view.k), Use::Update))
            .table(4, Table::Angles(run.rope.0 as usize))
            .table(5, Table::Positions)
            .table(6, Table::ChunkOf)
            .table(7, Table::Chunks)
            .table(8, pages)
            .grid([Extent::Is(1 + u32::from(run.low.is_some())), per_row(Rows::Tokens), Extent::Is(1)]);
        if let Some((norm, x, _)) = run.low {
            numbers.extend([is(self.width(x)), float(norm.eps)]);
            draft = draft
                .bind(9, self.buf_as(x, Use::Read))
                .bind(10, self.vector(norm.w))
                .bind(11, self.buf_as(norm.out, Use::Write));
        }
        self.push(draft.params(3, words.into_iter().map(is).chain(numbers)));
        if let Some((norm, _, part)) = run.low {
            self.op = "linear";
            self.products(norm.out, &[(part.w, part.bias, self.buf_as(part.out, Use::Write))]);
        }
        self.op = "latent";
        self.head_linear(run.heads, run.w, run.transposed, run.q, Some((run.d_query[1], run.rope)));
    }

    /// A kernel for the types of the caches, as `kv.h` has them.
    fn cached(&self, source: Source, kernel: &'static str) -> Draft {
        let code = |t| match t {
            KvType::F32 => 0,
            KvType::F16 => 1,
            KvType::Q8_0 | KvType::Q4_0 => 2,
        };
        let CacheType { k, v } = self.at.cache;
        Draft::new(source, kernel).define("K_TYPE", code(k)).define("V_TYPE", code(v))
    }

    pub(super) fn cache(&self, cache: Cache) -> (CacheView, Table) {
        let view = self.at.caches[cache.0 as usize];
        (view, if view.decl.window.is_some() { Table::WindowPages } else { Table::Pages })
    }

    pub(super) fn kv_append(&mut self, cache: Cache, k: Buf, v: Option<Buf>) {
        let (view, pages) = self.cache(cache);
        let CacheDecl { n_kv, d_k, d_v, window, .. } = view.decl;
        let mut draft = self
            .cached(sources::KV_APPEND, "kv_append")
            .define("HAS_V", usize::from(v.is_some()))
            .bind(0, self.buf(k))
            .bind(1, (Place::Fixed(view.k), Use::Update));
        if let (Some(v), Some(cache)) = (v, view.v) {
            draft = draft.bind(2, self.buf(v)).bind(3, (Place::Fixed(cache), Use::Update));
        }
        self.push(
            draft
                .params(4, [is(n_kv), is(d_k), is(d_v), is(usize::from(window.is_some()))])
                .table(5, Table::Positions)
                .table(6, Table::ChunkOf)
                .table(7, Table::Chunks)
                .table(8, pages)
                .grid([per_row(Rows::Tokens), Extent::Is(1), Extent::Is(1)]),
        );
    }

    pub(super) fn attention(
        &mut self,
        cache: Cache,
        q: Buf,
        n_head: usize,
        [scale, softcap]: [f32; 2],
        (window, chunked): (Option<usize>, bool),
        chosen: Option<Buf>,
        sinks: Option<Weight>,
        out: Buf,
    ) {
        let (view, pages) = self.cache(cache);
        let CacheDecl { n_kv, d_k, d_v, v_in_k, window: kept } = view.decl;
        let words = [n_head, n_kv, crate::window_word(window, chunked) as usize, usize::from(kept.is_some())];
        let draft = |source, kernel| {
            let draft = self
                .cached(source, kernel)
                .define("D_K", d_k)
                .define("D_V", d_v)
                .define("V_IN_K", usize::from(v_in_k))
                .define("SINKS", usize::from(sinks.is_some()))
                .bind(0, self.buf(q))
                .bind(1, (Place::Fixed(view.k), Use::Read))
                .params(4, words.into_iter().map(is).chain([float(scale), float(softcap)]))
                .table(7, Table::Chunks)
                .table(8, pages);
            let draft = view.v.into_iter().fold(draft, |draft, v| draft.bind(2, (Place::Fixed(v), Use::Read)));
            sinks.into_iter().fold(draft, |draft, sinks| draft.bind(9, self.vector(sinks)))
        };
        let with_ends = |draft: Draft, spans| match spans {
            0 => draft,
            _ => draft.table(10, Table::Ends),
        };
        let by_row = |spans| {
            let draft = draft(sources::ATTENTION, "attention")
                .define("SPLIT", 0)
                .define("CHOSEN", 0)
                .define("SPANS", spans)
                .bind(3, self.buf(out))
                .table(5, Table::Positions)
                .table(6, Table::ChunkOf)
                .grid([Extent::Is(n_head as u32), per_row(Rows::Tokens), Extent::Is(1)]);
            with_ends(draft, spans)
        };
        let rows =
            variants::attention_tile(d_k, d_v).filter(|_| !self.at.tuning.is_plain && !self.at.tuning.off.attention);
        let tiles = |rows: usize, spans| {
            let tiles = Extent::Longest { each: (n_head / n_kv) as u32, per: rows as u32 };
            let draft = draft(sources::ATTENTION_TILES, "attention_tiles")
                .bind(3, self.buf(out))
                .define("ROWS", rows)
                .define("SPANS", spans)
                .grid([tiles, Extent::Is(n_kv as u32), Extent::Chunks])
                .threads(variants::TILE_THREADS);
            with_ends(draft, spans)
        };
        // As SPANS of the kernels.
        let heeds_spans = crate::heeds_spans(self.plan, window);
        let spans = usize::from(heeds_spans) + usize::from(heeds_spans && self.plan.reach(window) != usize::MAX);
        let forms = |spans| (rows.map(|rows| tiles(rows, spans)), by_row(spans));
        // Where all positions are chosen the others run.
        let sees_more = chosen.filter(|_| self.at.ranks.is_some()).map(|chosen| {
            let n = self.width(chosen);
            let list = draft(sources::ATTENTION, "attention")
                .define("SPLIT", 0)
                .define("CHOSEN", 1)
                .define("SPANS", 0)
                .bind(3, self.buf(out))
                .bind(11, self.buf(chosen))
                .table(5, Table::Positions)
                .table(6, Table::ChunkOf)
                .params(4, words.into_iter().map(is).chain([float(scale), float(softcap), is(n)]))
                .grid([Extent::Is(n_head as u32), per_row(Rows::Tokens), Extent::Is(1)]);
            (list, more_than(n))
        });
        // A layer with a window has few keys.
        let is_split = !heeds_spans
            && chosen.is_none()
            && window.is_none()
            && !self.at.tuning.is_plain
            && !self.at.tuning.off.attention;
        let split = self.at.parts.filter(|_| is_split).map(|(parts, part, n_parts)| {
            let due = When { count: Count::Reach { below: variants::LEAST_ROWS }, from: part + 1, to: usize::MAX };
            let row_bytes = n_head as u64 * n_parts as u64 * (d_v as u64 + 2) * 4;
            let place = Place::Rows(parts, Rows::Tokens, row_bytes);
            let words = words.into_iter().map(is).chain([float(scale), float(softcap)]);
            let split = draft(sources::ATTENTION, "attention")
                .define("SPLIT", 1)
                .define("CHOSEN", 0)
                .define("SPANS", 0)
                .table(5, Table::Positions)
                .table(6, Table::ChunkOf)
                .bind(3, (place, Use::Update))
                .params(4, words.chain([is(part), is(n_parts)]))
                .grid([Extent::Is(n_head as u32), per_row(Rows::Tokens), Extent::Parts { per: part as u32 }]);
            let merge = Draft::new(sources::ATTENTION_MERGE, "attention_merge")
                .define("D_V", d_v)
                .define("SINKS", usize::from(sinks.is_some()))
                .bind(0, (place, Use::Read))
                .bind(1, self.buf(out))
                .params(2, [n_head, part, n_parts].map(is))
                .table(3, Table::Positions)
                .grid([Extent::Is(n_head as u32), per_row(Rows::Tokens), Extent::Is(1)]);
            let merge = sinks.into_iter().fold(merge, |merge, sinks| merge.bind(4, self.vector(sinks)));
            (split, merge, due)
        });
        let with_spans = heeds_spans.then(|| forms(spans));
        // Steps of encoders are spans. Those of text models have some where there are images.
        let plain = (!heeds_spans || !(self.plan.is_encoder() || self.plan.whole)).then(|| forms(0));
        let has_both = with_spans.is_some() && plain.is_some();
        if let Some(with_spans) = with_spans {
            let none = When { count: Count::Spans, from: 0, to: 1 };
            self.attend(with_spans, has_both.then_some(none));
        }
        let mut unless = has_both.then_some(When { count: Count::Spans, from: 1, to: usize::MAX });
        if let Some((split, merge, due)) = split {
            self.when = Some(due);
            self.push(split);
            self.push(merge);
            unless = Some(due);
        }
        if let Some(plain) = plain {
            self.attend(plain, unless.or(sees_more.as_ref().map(|(_, when)| *when)));
        }
        if let Some((list, when)) = sees_more {
            self.when = Some(when);
            self.push(list);
            self.when = None;
        }
    }

    /// Lists of the positions that attention sees, where a sequence of the step has more than are chosen.
    pub(super) fn choose(&mut self, cache: Cache, [q, weights]: [Buf; 2], out: Buf) {
        let Some(Ranks { span, stride, tokens, slices }) = self.at.ranks else { return };
        let (view, pages) = self.cache(cache);
        let (n, n_head) = (self.width(out), self.width(weights));
        self.unless = Some(When { from: 0, to: n + 1, ..more_than(n) });
        for first in (0..slices).map(|slice| slice * tokens) {
            self.when = Some(When { count: Count::Rows(Rows::Tokens), from: first + 1, to: usize::MAX });
            let threads = if self.at.tuning.is_plain { THREADS } else { 4 * THREADS };
            let words = [first, tokens, stride, n, n_head].map(is);
            let draft = |kernel| {
                self.cached(sources::CHOOSE, kernel)
                    .define("D", view.decl.d_k)
                    .define("THREADS", threads as usize)
                    .params(4, [Word::Each(Rows::Tokens, 1)].into_iter().chain(words))
                    .table(5, Table::Positions)
            };
            let scores = draft("choose_scores")
                .bind(0, self.buf_as(q, Use::Read))
                .bind(1, (Place::Fixed(view.k), Use::Read))
                .bind(2, self.buf_as(weights, Use::Read))
                .bind(3, (Place::Fixed(span), Use::Update))
                .table(6, Table::ChunkOf)
                .table(7, Table::Chunks)
                .table(8, pages)
                .grid([Extent::Parts { per: THREADS }, per_row(Rows::Tokens), Extent::Is(1)]);
            let best = draft("choose_best")
                .bind(0, (Place::Fixed(span), Use::Read))
                .bind(1, self.buf_as(out, if slices == 1 { Use::Write } else { Use::Update }))
                .grid([per_row(Rows::Tokens), Extent::Is(1), Extent::Is(1)])
                .threads(threads);
            self.push(scores);
            self.push(best);
        }
        (self.when, self.unless) = (None, None);
    }

    /// Attention in tiles, where heads fit them, and row by row for few tokens.
    fn attend(&mut self, (tiles, by_row): (Option<Draft>, Draft), unless: Option<When>) {
        let when = |from, to| Some(When { count: Count::Longest, from, to });
        (self.when, self.unless) = (None, unless);
        if let Some(tiles) = tiles {
            self.when = when(variants::LEAST_ROWS, usize::MAX);
            self.push(tiles);
            self.when = when(0, variants::LEAST_ROWS);
        }
        self.push(by_row);
        (self.when, self.unless) = (None, None);
    }
}
