// Counts of experts and what follows from them: shares, the busiest, what a cache would hit, CSV. No elements here.

/** Counts of one answer or of all: `routers` is `[{layer, n_expert, n_used}]`, `counts` is `[router][expert]`. */
export class Load {
  constructor(routers, tokens = 0, counts = routers.map((router) => new Array(router.n_expert).fill(0))) {
    Object.assign(this, { routers, tokens, counts });
  }

  /** Counts the experts of a token, those of all routers one after the other. */
  push(ids) {
    this.tokens++;
    let at = 0;
    this.routers.forEach((router, i) => {
      for (let s = 0; s < router.n_used; s++) this.counts[i][ids[at++]]++;
    });
  }

  /** How often an expert was chosen beside an even load of its layer; 1 is even. */
  ratio(router, expert) {
    const { n_expert, n_used } = this.routers[router];
    return this.tokens ? (this.counts[router][expert] * n_expert) / (this.tokens * n_used) : 0;
  }

  /** Experts of a layer, the busiest first. */
  order(router) {
    const counts = this.counts[router];
    return counts.map((_, expert) => expert).sort((a, b) => counts[b] - counts[a] || a - b);
  }

  /** How many of the busiest experts of a layer do half of its work. */
  half(router) {
    const total = this.counts[router].reduce((sum, n) => sum + n, 0);
    let sum = 0;
    return total ? this.order(router).findIndex((expert) => (sum += this.counts[router][expert]) * 2 >= total) + 1 : 0;
  }

  /** `[{layer, expert, count, share}]` over all layers, the busiest first; `share` is of the layer's tokens. */
  top(n) {
    const all = this.routers.flatMap((router, i) =>
      Array.from(this.counts[i], (count, expert) => ({
        layer: router.layer,
        expert,
        count,
        share: count / Math.max(1, this.tokens),
      })),
    );
    return all.sort((a, b) => b.count - a.count || a.layer - b.layer || a.expert - b.expert).slice(0, n);
  }

  /** Share of all choices that the `n` busiest experts of the whole model take, for every n from 0 on. */
  hits() {
    const sorted = this.counts.flatMap((layer) => Array.from(layer)).sort((a, b) => b - a);
    const total = sorted.reduce((sum, n) => sum + n, 0) || 1;
    let sum = 0;
    return [0, ...sorted.map((n) => (sum += n) / total)];
  }

  csv() {
    const rows = this.routers.flatMap((router, i) =>
      Array.from(this.counts[i], (n, e) => [router.layer, e, n, this.tokens].join(",")),
    );
    return `${["layer,expert,count,tokens", ...rows].join("\n")}\n`;
  }
}

/** Index of the first of a router's ids among those of a token. */
export const offset = (routers, router) => routers.slice(0, router).reduce((at, r) => at + r.n_used, 0);

/**
 * Share of the choices that a cache of `n` experts serves which starts empty and evicts the least recently used one;
 * `trace` holds the experts of each token.
 */
export function lru(routers, trace, n) {
  const cache = new Set();
  let [hits, total] = [0, 0];
  for (const ids of trace) {
    let at = 0;
    routers.forEach((router, i) => {
      for (let s = 0; s < router.n_used; s++) {
        const key = i * 65536 + ids[at++];
        total++;
        // A set keeps the order in which keys came: the oldest is first.
        if (cache.delete(key)) hits++;
        else if (cache.size >= n) cache.delete(cache.keys().next().value);
        if (n > 0) cache.add(key);
      }
    });
  }
  return total ? hits / total : 0;
}

/** One line for every token and layer of an answer; `tokens` is `[{text, experts}]`. */
export function traceCsv(routers, tokens) {
  const quoted = (text) => `"${text.replaceAll('"', '""').replaceAll("\n", "\\n")}"`;
  const rows = tokens.flatMap(({ text, experts }, t) =>
    routers.map((router, i) => {
      const at = offset(routers, i);
      return [t, quoted(text ?? ""), router.layer, `"${experts.slice(at, at + router.n_used).join(" ")}"`].join(",");
    }),
  );
  return `${["token,text,layer,experts", ...rows].join("\n")}\n`;
}
