// Experts at work: a grid of layers and experts. Brightness is how often an expert was chosen in this answer, the accent colour
// marks the ones of the last tokens. Beside it a table says for each layer how even the load is.

const AFTERGLOW = 3; // tokens

export class RoutingView {
  constructor(canvas, body, text) {
    this.canvas = canvas;
    this.body = body;
    this.text = text;
    /** Null until the server has said. */
    this.routers = null;
    this.tokens = 0;
    this.due = false;
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** The routers of the model: `[{layer, n_expert, n_used}]`. */
  start(routers) {
    this.routers = routers;
    this.offsets = [];
    routers.reduce((at, router, i) => ((this.offsets[i] = at), at + router.n_used), 0);
    this.clear();
  }

  clear() {
    this.tokens = 0;
    this.counts = this.routers?.map((router) => new Uint32Array(router.n_expert));
    this.last = this.routers?.map((router) => new Int32Array(router.n_expert).fill(-AFTERGLOW));
    this.draw();
  }

  /** Shows counts from elsewhere. */
  set(tokens, counts) {
    this.clear();
    this.tokens = tokens;
    this.counts = counts.map((layer) => Uint32Array.from(layer));
    this.draw();
  }

  /** The experts of a token, those of all routers one after the other. */
  push(ids) {
    this.tokens++;
    this.routers.forEach((router, i) => {
      for (let s = 0; s < router.n_used; s++) {
        const id = ids[this.offsets[i] + s];
        this.counts[i][id]++;
        this.last[i][id] = this.tokens;
      }
    });
    // Many tokens may come between two pictures.
    if (!this.due) {
      this.due = true;
      requestAnimationFrame(() => ((this.due = false), this.draw()));
    }
  }

  draw() {
    if (!this.routers) return;
    this.canvas.hidden = !this.routers.length;
    if (!this.routers.length) {
      this.text.textContent = "This model has no experts: every weight works on every token.";
      this.body.replaceChildren();
      return;
    }
    const width = this.canvas.clientWidth;
    if (!width) return;
    const n = Math.max(...this.routers.map((router) => router.n_expert));
    const ratio = devicePixelRatio || 1;
    const cell = width / n;
    const height = Math.max(3, Math.min(18, cell, 420 / this.routers.length));
    this.canvas.style.height = `${height * this.routers.length}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * this.routers.length * ratio);
    const style = getComputedStyle(document.documentElement);
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const paint = this.canvas.getContext("2d");
    paint.scale(ratio, ratio);
    const gap = cell > 4 ? 1 : 0;
    this.routers.forEach((router, i) => {
      const even = Math.max(1, (this.tokens * router.n_used) / router.n_expert);
      for (let e = 0; e < router.n_expert; e++) {
        const count = this.counts[i][e];
        if (!count) continue;
        // An even load is half bright.
        const heat = 1 - Math.pow(0.5, count / even);
        const glow = Math.max(0, 1 - (this.tokens - this.last[i][e]) / AFTERGLOW);
        paint.globalAlpha = Math.max(0.12, heat);
        paint.fillStyle = glow > 0 ? style.getPropertyValue("--glow") || "#e8590c" : dark ? "#93a0ff" : "#3a4bd8";
        if (glow > 0) paint.globalAlpha = Math.max(heat, 0.35 + 0.65 * glow);
        paint.fillRect(e * cell, i * height, Math.max(0.5, cell - gap), Math.max(1, height - gap));
      }
    });
    this.tell();
  }

  tell() {
    const rows = this.routers.map((router, i) => {
      const counts = this.counts[i];
      const total = counts.reduce((a, b) => a + b, 0);
      const used = counts.filter((c) => c > 0).length;
      // Entropy of the load over that of an even one.
      const entropy = total ? counts.reduce((sum, c) => (c ? sum - (c / total) * Math.log(c / total) : sum), 0) : 0;
      const evenness = total && router.n_expert > 1 ? entropy / Math.log(router.n_expert) : 0;
      const busiest = counts.indexOf(Math.max(...counts));
      return { layer: router.layer, used, of: router.n_expert, evenness, busiest: total ? busiest : "" };
    });
    const mean = rows.reduce((sum, row) => sum + row.evenness, 0) / rows.length;
    this.text.textContent = this.tokens
      ? `${this.tokens} tokens, ${this.routers.length} layers, mean evenness ${mean.toFixed(2)} (1: all experts work alike).`
      : "Every row is a layer, every column an expert. They light up with each token of the next answer.";
    this.body.replaceChildren(
      ...rows.map((row) => {
        const line = document.createElement("tr");
        for (const value of [row.layer, `${row.used} of ${row.of}`, row.evenness.toFixed(2), row.busiest]) {
          line.append(Object.assign(document.createElement("td"), { textContent: value }));
        }
        return line;
      }),
    );
  }
}
