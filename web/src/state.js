// What the page's modules share. `app.js` fills it in.

export const state = {
  /** Conversations and settings. */
  store: null,
  /** `{id, max_model_len, meta}` once the server has said. */
  model: null,
  /** The answer that is being written: `{node, conversation, abort}`. */
  running: null,
  /** The view of the experts. */
  routing: null,
  /** Tokens of answers by message, `[{text, bytes, logprob, top, experts}]`. Not stored: gone after a reload. */
  tokens: new Map(),
  /** Saves and draws what the store holds now. */
  changed: async () => {},
  /** Shows a line about something that went wrong; "" takes it away. */
  notice: () => {},
};
