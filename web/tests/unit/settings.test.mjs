// The settings panel follows the server's description.

import assert from "node:assert/strict";
import test from "node:test";
import { groupsOf } from "../../src/settings.js";

test("a sampling parameter that the page has never heard of gets its field", () => {
  const fields = {
    temperature: { title: "Temperature", "x-group": "Sampling" },
    new_penalty: { title: "New penalty", "x-group": "Repetition" },
    odd: { title: "Odd", "x-group": "A new group" },
    temp: {},
    max_tokens: {},
    stop: {},
  };
  assert.deepEqual(groupsOf(fields), [
    ["Sampling", [["temperature", "Temperature"], ["max_tokens", "Maximum tokens"]]],
    ["Repetition", [["new_penalty", "New penalty"]]],
    ["More samplers", []],
    ["Stopping", [["stop", "Stop strings (JSON list)"]]],
    ["A new group", [["odd", "Odd"]]],
  ]);
});
