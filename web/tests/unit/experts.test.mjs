// Counts of experts, and what follows from them.

import assert from "node:assert/strict";
import test from "node:test";
import { Load, lru } from "../../src/experts.js";

const ROUTERS = [
  { layer: 0, n_expert: 4, n_used: 1 },
  { layer: 2, n_expert: 4, n_used: 1 },
];
const TRACE = [
  [0, 3],
  [0, 3],
  [1, 3],
  [0, 2],
];

test("counts, shares and the busiest follow the trace", () => {
  const load = new Load(ROUTERS);
  TRACE.forEach((ids) => load.push(ids));
  assert.deepEqual(load.counts, [
    [3, 1, 0, 0],
    [0, 0, 1, 3],
  ]);
  assert.deepEqual(
    load.top(2).map((e) => [e.layer, e.expert, e.count, e.share]),
    [
      [0, 0, 3, 0.75],
      [2, 3, 3, 0.75],
    ],
  );
  assert.deepEqual([load.half(0), load.half(1), load.ratio(0, 0)], [1, 1, 3]);
  const hits = load.hits();
  assert.deepEqual([hits[0], hits[2], hits[8]], [0, 0.75, 1]);
  assert.deepEqual(load.csv().split("\n").slice(0, 2), ["layer,expert,count,tokens", "0,0,3,4"]);
});

test("a cache of the last used experts hits what can be counted by hand", () => {
  // 0a 3b | 0a 3b | 1a 3b | 0a 2b, with caches of 0, 1, 2, 3 and 8.
  assert.deepEqual(
    [0, 1, 2, 3, 8].map((size) => lru(ROUTERS, TRACE, size)),
    [0, 0, 3 / 8, 4 / 8, 4 / 8],
  );
});
