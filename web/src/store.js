// Conversations and presets in this browser's IndexedDB, a record each, so that two tabs never write over each other: a
// save merges with what is stored, and tells the other tabs. Knows nothing of the page and the server.

import { checked, conversation as fresh, merge, sound, takeBack } from "./tree.js";

const OLD = "moebius.conversations"; // one value for all of them, as the first version of the page kept them
const SETTINGS = "moebius.settings";
const CURRENT = "moebius.current";
const CONVERSATIONS = "conversations";
const PRESETS = "presets";

/** The result of a request, or its error. */
const done = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

/** The end of a transaction: only then is a record safe. */
const committed = (transaction) =>
  new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });

function openDatabase() {
  const request = indexedDB.open("moebius", 1);
  request.onupgradeneeded = () => {
    request.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
    request.result.createObjectStore(PRESETS, { keyPath: "name" });
  };
  return done(request);
}

/** The database of this version of the page; it makes way for a later one. */
async function database() {
  const opened = await openDatabase();
  opened.onversionchange = () => opened.close();
  return opened;
}

function readJson(storage, name) {
  try {
    return JSON.parse(storage.getItem(name));
  } catch {
    return null;
  }
}

export class Store {
  /** Newest first. */
  list = [];
  presets = [];
  settings = { sampling: {}, thinking: "", key: "", schema: "", probabilities: false, model: "", theme: "" };
  current = null;
  /** Called when another tab changed something: with the conversation, or null for the settings. */
  onChange = () => {};
  /** Whether an answer is being written to the conversation of this id. */
  isBusy = () => false;
  #database = null;
  #channel = null;

  /** The settings before the database is opened. */
  static storedSettings() {
    return readJson(localStorage, SETTINGS) ?? {};
  }

  /** Opens the database, and takes over what an older page kept. Without one, nothing outlives the page. */
  static async open() {
    const store = new Store();
    Object.assign(store.settings, readJson(localStorage, SETTINGS));
    try {
      store.#database = await database();
      const read = store.#database.transaction([CONVERSATIONS, PRESETS]);
      const [list, presets] = [
        done(read.objectStore(CONVERSATIONS).getAll()),
        done(read.objectStore(PRESETS).getAll()),
      ];
      // A record that is no tree, as an older page may have kept it, would be walked without end.
      store.list = (await list).map(sound).filter((c) => c !== null);
      store.presets = await presets;
      await store.#migrate();
    } catch (error) {
      console.warn("conversations are not stored:", error);
      store.#database = null;
    }
    store.#sort();
    const id = sessionStorage.getItem(CURRENT) ?? localStorage.getItem(CURRENT);
    store.current = store.list.find((c) => c.id === id) ?? store.list[0] ?? store.create();
    store.#listen();
    return store;
  }

  /** Whether conversations outlive the page. */
  get keeps() {
    return this.#database !== null;
  }

  async #migrate() {
    const old = readJson(localStorage, OLD);
    if (!Array.isArray(old?.list)) return;
    for (const value of old.list.map((value) => checked(value))) {
      if (!value?.root.length) continue;
      const known = this.list.find((c) => c.id === value.id);
      if (known) merge(known, value);
      else this.list.push(value);
      await this.save(known ?? value);
    }
    if (old.current) localStorage.setItem(CURRENT, old.current);
    // Only after every record is safe.
    localStorage.removeItem(OLD);
  }

  #listen() {
    this.#channel = new BroadcastChannel("moebius");
    this.#channel.onmessage = async ({ data }) => {
      if (data.presets) this.presets = await done(this.#database.transaction(PRESETS).objectStore(PRESETS).getAll());
      // A conversation that is being written here stays.
      if (data.removed && !this.isBusy(data.removed)) this.#forget(data.removed);
      if (data.saved) {
        const theirs = await done(this.#database.transaction(CONVERSATIONS).objectStore(CONVERSATIONS).get(data.saved));
        const ours = this.list.find((c) => c.id === data.saved);
        const value = theirs && sound(theirs);
        if (value && ours) merge(ours, value);
        else if (value) this.list.push(value);
        this.#sort();
      }
      this.onChange(data.saved ?? data.removed ?? null);
    };
    addEventListener("storage", (event) => {
      if (event.key !== SETTINGS) return;
      Object.assign(this.settings, readJson(localStorage, SETTINGS));
      this.onChange(null);
    });
  }

  #sort() {
    this.list.sort((a, b) => (b.updated ?? 0) - (a.updated ?? 0));
  }

  #forget(id) {
    this.list = this.list.filter((c) => c.id !== id);
    if (this.current?.id === id) this.current = this.list[0] ?? this.create();
  }

  /** Makes a conversation the one that is shown, also after a reload of this tab. */
  choose(conversation) {
    this.current = conversation;
    sessionStorage.setItem(CURRENT, conversation.id);
    localStorage.setItem(CURRENT, conversation.id);
  }

  /**
   * Stores a conversation, merged with what another tab stored. Resolves when it is safe; false where the browser has
   * no room or keeps nothing. An empty one is not kept.
   */
  async save(conversation = this.current) {
    if (!this.#database) return false;
    // One that was deleted meanwhile stays so.
    if (!this.list.includes(conversation) || (!conversation.root.length && !conversation.system)) return true;
    try {
      const transaction = this.#database.transaction(CONVERSATIONS, "readwrite");
      const records = transaction.objectStore(CONVERSATIONS);
      const stored = await done(records.get(conversation.id));
      const value = stored && sound(stored);
      if (value) merge(conversation, value);
      records.put(conversation);
      await committed(transaction);
      this.#channel?.postMessage({ saved: conversation.id });
      return true;
    } catch {
      return false;
    }
  }

  /** Takes messages that a conversation no longer has out of its record too. */
  async drop(conversation, nodes) {
    await this.#change(CONVERSATIONS, async (records) => {
      const stored = await done(records.get(conversation.id));
      if (!stored) return;
      for (const { id } of nodes.filter((node) => !conversation.nodes[node.id] && stored.nodes[node.id])) {
        takeBack(stored, stored.nodes[id]);
      }
      records.put(stored);
    });
  }

  saveSettings(name, value) {
    // Fields that another tab changed meanwhile stay as they are there.
    Object.assign(this.settings, readJson(localStorage, SETTINGS), { [name]: value });
    try {
      localStorage.setItem(SETTINGS, JSON.stringify(this.settings));
      return true;
    } catch {
      return false;
    }
  }

  create() {
    const conversation = this.list.find((c) => !c.root.length) ?? fresh();
    conversation.updated = Date.now();
    this.list = [conversation, ...this.list.filter((c) => c !== conversation)];
    this.choose(conversation);
    return conversation;
  }

  async remove(conversations) {
    const ids = conversations.map((c) => c.id);
    ids.forEach((id) => this.#forget(id));
    if (!this.#database) return;
    const transaction = this.#database.transaction(CONVERSATIONS, "readwrite");
    ids.forEach((id) => transaction.objectStore(CONVERSATIONS).delete(id));
    await committed(transaction);
    ids.forEach((id) => this.#channel?.postMessage({ removed: id }));
  }

  /** Takes conversations in: deleted ones again, or those of a file. One that is known is merged. */
  async take(conversations) {
    for (const conversation of conversations) {
      const known = this.list.find((c) => c.id === conversation.id);
      if (known) merge(known, conversation);
      else this.list.push(conversation);
      await this.save(known ?? conversation);
    }
    this.#sort();
  }

  async savePreset(name, text) {
    this.presets = [...this.presets.filter((p) => p.name !== name), { name, text }];
    await this.#change(PRESETS, (records) => records.put({ name, text }));
  }

  async removePreset(name) {
    this.presets = this.presets.filter((p) => p.name !== name);
    await this.#change(PRESETS, (records) => records.delete(name));
  }

  async #change(store, act) {
    if (!this.#database) return;
    const transaction = this.#database.transaction(store, "readwrite");
    const end = committed(transaction);
    await act(transaction.objectStore(store));
    await end;
    if (store === PRESETS) this.#channel?.postMessage({ presets: true });
  }
}
