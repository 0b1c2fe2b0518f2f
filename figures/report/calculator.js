// The calculator: reads the form, evaluates MODEL (printed from SymPy), fills the table.
// Kept free of the page where it can be, so that it also runs under a bare JavaScript engine.
// calculate(input) gives what repro.predict(..., once=True) gives; a test holds it to that.

// input.block_m and block_n are null where the kernels' own tile is wanted.
function calculate(input) {
  check(input);
  const visible = window_of(input);
  const run = launched(input, visible);
  const gpu = GPUS[input.gpu];
  const padded = run.head_dim;
  const values = {
    B: input.batch, H: input.heads, H_k: input.kv_heads, N_q: input.seqlen_q, N_k: input.seqlen_k,
    d: padded, D: input.head_dim, C: run.columns, e: ITEMSIZE[input.dtype],
    B_r: run.block_m, B_c: run.block_n, tanh: input.softcap ? TANH_SPECIALS[input.dtype] : 0, ...visible.bounds,
  };
  for (const [symbol, count] of Object.entries(COUNTS[visible.mask])) values[symbol] = count(values);
  const model = MODEL[[run.model, input.pass, ...options(input, visible)].join(" ")];
  const copied = padded === input.head_dim ? 0
    : sum(COPIES[input.pass].map(([, , f]) => f(values)));
  const works = model.kernels.map((kernel) => work(kernel, values, run, gpu, visible));
  if (copied) works.push({ flops: 0, exponentials: 0, sm: copied, hbm: copied, efficiency: 1 });
  const given = { ...values, d: input.head_dim };
  const peak = model.peak(values) + (copied ? model.given(values) : 0);
  const blocks = model.kernels.find((kernel) => kernel.main).blocks(values);
  const rates = CEILINGS[input.gpu][input.ceilings];
  const least = bound(works, rates);
  const result = {
    ...run, traffic: traffic(model, input.pass, values, copied), copy_bytes: copied, blocks,
    idle_sms: Math.max(0, gpu.sms - blocks), ceilings: rates.origin,
    sm_bytes: sum(works.map((w) => w.sm)),
    hbm_read_bytes: sum(model.kernels.map((k) => k.hbm_read(values))) + copies("read"),
    hbm_write_bytes: sum(model.kernels.map((k) => k.hbm_write(values))) + copies("write"),
    saved_bytes: model.saved(given), peak_bytes: peak, fits: peak <= gpu.memory,
    flops: model.flops(given), ...least,
    predicted: predicted(input, run, gpu, visible, copied, least.seconds),
  };
  return result;

  function copies(direction) {
    if (!copied) return 0;
    return sum(COPIES[input.pass].filter(([, way]) => way === direction).map(([, , f]) => f(values)));
  }
}

const sum = (numbers) => numbers.reduce((total, x) => total + x, 0);

function check(input) {
  const fields = ["batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim"];
  const tile = ["block_m", "block_n"].filter((name) => input[name] !== null);
  if (tile.length === 1)
    throw new Error("a tile has block_m and block_n: give both, or neither for the kernels' own");
  for (const name of [...fields, ...tile]) {
    if (!Number.isInteger(input[name]) || input[name] < 1)
      throw new Error(`${name} = ${input[name]}: a whole number from 1 on is needed`);
  }
  if (input.heads % input.kv_heads)
    throw new Error(`heads = ${input.heads} is not a multiple of kv_heads = ${input.kv_heads}`);
  if (input.kv_heads !== input.heads && !GROUPED.includes(input.algorithm))
    throw new Error(`${input.algorithm} has as many key/value heads as query heads`);
  for (const name of ["window_left", "window_right", "sinks"]) {
    if (input[name] !== null && (!Number.isInteger(input[name]) || input[name] < 0))
      throw new Error(`${name} = ${input[name]}: a whole number from 0 on is needed`);
  }
  const reason = (REFUSED[input.gpu] || {})[`${input.algorithm} ${input.dtype}`];
  if (reason) throw new Error(reason);
  const rates = CEILINGS[input.gpu][input.ceilings];
  if (typeof rates === "string") throw new Error(rates);
  for (const [rows, block] of [[input.seqlen_q, input.block_m], [input.seqlen_k, input.block_n]])
    if (Math.ceil(rows / (block === null ? 16 : block)) > 1e7)
      throw new Error("more than ten million tiles");
}

// analysis.window.Window.of, and whether the window hides what the causal mask leaves.
function window_of(input) {
  const [N_q, N_k] = [input.seqlen_q, input.seqlen_k];
  const mask = input.causal ? "causal" : "dense";
  const bounds = (left, right, sinks) => ({
    left: left === null ? N_k : Math.min(left, N_k),
    right: right === null ? N_q : Math.min(right, N_q),
    sinks: Math.min(sinks, N_k),
  });
  const pairs = (found) => COUNTS[mask].n({ N_q, N_k, ...found });
  const found = bounds(input.window_left, input.window_right, input.sinks);
  const visible = pairs(found);
  return { mask, bounds: found, masked: visible !== N_q * N_k,
    hides: visible !== pairs(bounds(null, null, 0)) };
}

// The words of a variant of MODEL (figures.report.calculator.variants).
function options(input, visible) {
  const words = input.alibi ? ["alibi"] : [];
  if (input.bias === "none") return words;
  const items = ["full", "items"].includes(input.bias) || input.batch === 1;
  const heads = ["full", "heads"].includes(input.bias) || input.heads === 1;
  words.push(items && heads ? "full" : input.bias);
  if (input.pass === "backward" && (input.causal || visible.hides)) words.push("partial");
  return words;
}

// What is asked for that not every kernel has, by the names of launch_tables.options.
function asked_for(input, visible) {
  return { softcap: input.softcap, alibi: input.alibi, bias: input.bias !== "none",
    window: visible.hides, order: input.order !== "rows" };
}

// Which kernel runs, with which tile: the drivers' answers, from the tables.
function launched(input, visible) {
  const gpu = GPUS[input.gpu];
  const used = asked_for(input, visible);
  const head_dim = Math.ceil(input.head_dim / 8) * 8;
  for (const option of Object.keys(used)) {
    const refused = REFUSED_OPTIONS[`${input.algorithm} ${input.pass} ${option}`];
    if (used[option] && refused) throw new Error(refused);
  }
  const first = (refusals) => (refusals[`${input.pass} ${input.dtype} ${head_dim}`] || [])
    .find(([options]) => options.every((option) => used[option]));
  const refused = input.algorithm === "flash-sm90" && first(REFUSED_ON_HOPPER);
  if (refused) throw new Error(refused[1]);
  const asked = input.block_m === null ? null : [input.block_m, input.block_n];
  let [name, reason] = [input.algorithm, ""];
  const ladder = !["auto", "flash-sm90", ...FLASH].includes(name);
  if (ladder) {
    const [m, n] = asked || ladder_tile(input, gpu);
    return { algorithm: name, model: name, reason, theory: "", form: null, head_dim,
      columns: head_dim, block_m: m, block_n: n, blocks_per_sm: 1, shared_per_tensor: 0,
      spills: false };
  }
  const largest = HEAD_DIMS[HEAD_DIMS.length - 1];
  if (input.head_dim > largest)
    throw new Error(`head_dim = ${input.head_dim} is above ${largest}, the most of the flash kernels`);
  if (name === "auto") {
    const picks = PICKS[gpu.architecture];
    [name, reason] = picks[""] || picks[`${input.pass} ${input.dtype} ${head_dim}`];
    const against = first(AGAINST_HOPPER);
    if (name === "flash-sm90" && against) [name, reason] = ["flash", against[1]];
    if (asked && gpu.hopper)
      [name, reason] = ["flash", `tile (${asked[0]}, ${asked[1]}) was asked for`];
  }
  const theory = THEORY[input.gpu] || "";
  if (theory) reason = "";
  const changed = Object.values(used).some(Boolean);
  const features = ["window", "softcap", "alibi"].filter((option) => used[option]);
  const featured = features.length > 0;
  if (input.softcap && input.dtype === "fp16") features.push("fp16");  // another tanh
  if (name === "flash-sm90")
    return { ...hopper(input, head_dim, asked, featured), reason, features };
  return { ...sm80(input, name, head_dim, asked, visible), reason, theory, changed };
}

function ladder_tile(input, gpu) {
  const tiles = LADDER_TILES[`${input.algorithm} ${input.pass} ${input.dtype} ${gpu.shared}`];
  const found = tiles.find(([largest]) => input.head_dim <= largest);
  if (!found)
    throw new Error(`head_dim = ${input.head_dim}: give a tile, block_m and block_n`);
  return found.slice(1);
}

function hopper(input, head_dim, asked, featured) {
  const covered = HOPPER.head_dims[input.pass];
  if (!covered.includes(head_dim))
    throw new Error(`head_dim = ${input.head_dim}: the Hopper ${input.pass} covers ${covered.join(", ")}`);
  const length = featured ? "featured"
    : input.order === "sawtooth" && input.pass === "forward" ? "sawtooth"
    : input.seqlen_q <= HOPPER.short ? "short" : "long";
  const mask = input.causal ? "causal" : "dense";
  const name = asked ? HOPPER.of_tile[`${input.pass} ${head_dim} ${asked[0]} ${asked[1]}`]
    : HOPPER.picked[`${input.pass} ${head_dim} ${mask} ${length}`];
  if (!name)
    throw new Error(`the Hopper ${input.pass} has no tile ${asked[0]} x ${asked[1]} at head_dim ${head_dim}`);
  const form = HOPPER.forms[`${input.pass} ${name}`];
  return { algorithm: "flash-sm90", model: form.persistent ? "flash-sm90 persistent" : "flash-sm90",
    theory: "", form: name, head_dim, columns: head_dim, block_m: form.block_m,
    block_n: form.block_n, blocks_per_sm: 1, shared_per_tensor: form.shared_per_tensor,
    spills: false };
}

function sm80(input, name, head_dim, asked, visible) {
  const gpu = GPUS[input.gpu];
  const columns = HEAD_DIMS.find((d) => d >= head_dim);
  const what = `the flash ${input.pass} at head_dim = ${input.head_dim} in ${input.dtype}`;
  const limit = `a block of ${input.gpu} has ${gpu.shared} bytes of shared memory`;
  const [m, n] = asked
    || DEFAULT_TILES[`${input.pass} ${input.dtype} ${columns} ${gpu.shared}`] || [0, 0];
  if (!m) throw new Error(`no tile fits ${what}: ${limit}`);
  const [i, j] = [BLOCKS.indexOf(m), BLOCKS.indexOf(n)];
  if (i < 0 || j < 0)
    throw new Error(`tile ${m} x ${n}: the flash kernels take multiples of 16 up to ${BLOCKS[BLOCKS.length - 1]}`);
  const digit_of = (kernels, windowed) => {
    const changed = windowed || input.softcap || input.bias !== "none";
    const features = input.alibi ? "slopes" : changed ? "changed" : "plain";
    const digits = BLOCKS_PER_SM[`${kernels} ${input.dtype} ${columns} ${gpu.kind} ${features}`];
    return digits[i * BLOCKS.length + j];
  };
  const windowed = input.window_left !== null || input.window_right !== null;
  const of_both = input.pass === "backward" ? "auto backward" : input.pass;
  const fits = !asked || input.algorithm !== "auto" || digit_of(of_both, windowed) !== "0";
  const digit = digit_of(input.pass, visible.hides);
  if (!fits || digit === "0") throw new Error(`tile ${m} x ${n} does not fit ${what}: ${limit}`);
  const spills = digit >= "a";
  const table = SHARED_CLOCKS[`${input.pass} ${columns}${visible.hides ? " window" : ""}`] || {};
  const clocks = table[`${m} ${n}`] || 0;
  return { algorithm: name, model: name, form: null, head_dim, columns, block_m: m, block_n: n,
    blocks_per_sm: spills ? digit.charCodeAt(0) - 96 : parseInt(digit, 36), spills,
    shared_per_tensor: input.dtype === "fp32" ? 0 : clocks * (gpu.tensor_flops_per_clock || 0) };
}

function traffic(model, pass, values, copied) {
  const found = new Map();
  const entries = model.kernels.flatMap((kernel) => kernel.moved);
  for (const [tensor, direction, f] of copied ? [...entries, ...COPIES[pass]] : entries) {
    const key = `${tensor} ${direction}`;
    const before = found.has(key) ? found.get(key)[2] : 0;
    found.set(key, [tensor, direction, before + f(values)]);
  }
  return [...found.values()].filter(([, , bytes]) => bytes);
}

function work(kernel, values, run, gpu, visible) {
  const blocks = kernel.blocks && kernel.blocks(values);
  return {
    flops: kernel.flops(values), exponentials: kernel.exponentials(values),
    sm: sum(kernel.moved.map(([, , f]) => f(values))),
    hbm: kernel.hbm_read(values) + kernel.hbm_write(values),
    efficiency: blocks ? wave_efficiency(gpu.sms, blocks, kernel.alike || !visible.masked) : 1,
    shared_per_tensor: kernel.main ? run.shared_per_tensor : 0,
  };
}

// analysis.occupancy.wave_efficiency
function wave_efficiency(sms, blocks, alike) {
  return alike ? blocks / sms / Math.ceil(blocks / sms) : Math.min(blocks / sms, 1);
}

// analysis.time_model.predict_time: kernels one after another, each as slow as its slowest ceiling.
function bound(works, rates) {
  const times = {};
  let seconds = 0;
  for (const w of works) {
    const of_kernel = {
      "tensor cores": w.flops / rates.F / w.efficiency,
      exponentials: w.exponentials / rates.X / w.efficiency,
      "SM boundary": rates.S ? w.sm / rates.S / w.efficiency : 0,  // a rate that is not published
      HBM: w.hbm / rates.W,
    };
    if (w.shared_per_tensor)
      of_kernel["shared memory"] = of_kernel["tensor cores"] * w.shared_per_tensor;
    seconds += Math.max(...Object.values(of_kernel));
    for (const [name, t] of Object.entries(of_kernel)) times[name] = (times[name] || 0) + t;
  }
  const binding = Object.keys(times).reduce((a, b) => (times[b] > times[a] ? b : a));
  return { times, seconds, binding };
}

// Seconds that the kernels' machine code takes; null where no clocks are on record.
function predicted(input, run, gpu, visible, copied, least) {
  const kernels = of_machine_code(input, run, gpu, visible);
  if (kernels === null) return null;
  const found = kernels + copied / (HBM_SUSTAINED * gpu.hbm_bandwidth);
  return found < least ? null : found;
}

function of_machine_code(input, run, gpu, visible) {
  const clocks = run.form ? hopper_clocks(input, run, gpu, visible)
    : gpu.ampere ? ampere_clocks(input, run, gpu, visible.mask) : null;
  if (clocks === null) return null;
  if (input.pass === "forward")
    return clocks / gpu.clock + (run.model.endsWith("persistent") ? 2 : 1) * LAUNCH_S;
  const e = ITEMSIZE[input.dtype];
  const tensor = input.batch * input.heads * input.seqlen_q * run.head_dim * e;
  return clocks / gpu.clock + 7 * tensor / (HBM_SUSTAINED * gpu.hbm_bandwidth) + 3 * LAUNCH_S;
}

// The loop over tiles: how many tiles a head has, how many heads, and the rounds of a tile.
// visible: of Hopper's kernels, which may have a window.
function tile_loop(input, run, visible) {
  const forward = input.pass === "forward";
  const [inner, outer] = forward ? [run.block_n, run.block_m] : [run.block_m, run.block_n];
  const [outside, inside] = forward ? [input.seqlen_q, input.seqlen_k]
    : [input.seqlen_k, input.seqlen_q];
  const group = input.heads / input.kv_heads;
  const extra = input.seqlen_k - input.seqlen_q;
  const rounds = (tile) => {
    if (forward) {
      const last = Math.min((tile + 1) * outer, outside) + extra;
      if (visible && visible.hides)
        return Math.max(1, tiles_of_window(input, visible.bounds, tile * outer + extra, last, inner));
      return Math.max(1, Math.ceil((input.causal ? Math.min(inside, last) : inside) / inner));
    }
    if (visible && visible.hides)
      return Math.max(1, group * queries_of_window(input, visible.bounds, tile * outer, inner, outer));
    const first = input.causal ? Math.floor(Math.max(0, tile * outer - extra) / inner) : 0;
    return Math.max(1, group * (Math.ceil(inside / inner) - first));
  };
  const heads = input.batch * (forward ? input.heads : input.kv_heads);
  return { tiles: Math.ceil(outside / outer), heads, group, rounds };
}

// key_tiles_of in kernels/include/window.cuh: tiles of n keys that the rows with the diagonals
// first … last - 1 meet.
function tiles_of_window(input, { left, right, sinks }, first, last, n) {
  const end = input.causal ? 0 : right;
  const reach = Math.min(sinks, input.seqlen_k, input.causal ? Math.max(last, 0) : Infinity);
  const sink_tiles = Math.ceil(reach / n);
  const start = Math.max(first - left, 0);
  const keys = Math.min(last + end, input.seqlen_k);
  if (keys <= start) return sink_tiles;
  const skipped = Math.max(Math.floor(start / n) - sink_tiles, 0);
  return Math.max(Math.ceil(keys / n) - skipped, sink_tiles);
}

// query_tiles_of there: tiles of m queries that see any of the n keys from key0 on.
function queries_of_window(input, { left, right, sinks }, key0, m, n) {
  const extra = input.seqlen_k - input.seqlen_q;
  const sink = key0 < sinks;
  const start = sink && !input.causal ? 0
    : Math.max(key0 - extra - (input.causal ? 0 : right), 0);
  const last = Math.min(key0 + n, input.seqlen_k) - 1 - extra + left + 1;
  const rows = sink ? input.seqlen_q : Math.min(last, input.seqlen_q);
  return rows > start ? Math.ceil(rows / m) - Math.floor(start / m) : 0;
}

// kernels.timing.hopper_time.clocks: tiles fill the SMs in the order in which they start.
function hopper_clocks(input, run, gpu, visible) {
  const kind = [visible.mask, ...run.features].join(", ");
  const recorded = HOPPER.forms[`${input.pass} ${run.form}`].clocks[kind];
  if (!recorded) return null;
  const forward = input.pass === "forward";
  const { tiles, heads, group, rounds } = tile_loop(input, run, visible);
  if (heads * tiles > 2e7) return null;
  const e = ITEMSIZE[input.dtype];
  const a_head = forward ? 2 * input.seqlen_k * run.head_dim * e
    : group * input.seqlen_q * run.head_dim * (2 * e + 4);
  const fitting = Math.max(1, Math.floor(L2_BYTES_FOR_HEADS / a_head));
  const together = Math.min(heads, 2 ** Math.floor(Math.log2(fitting)));
  const order = Array.from({ length: tiles }, (_, i) => (forward ? tiles - 1 - i : i));
  const free = new Float64Array(gpu.sms);
  for (let head = 0; head < heads; head += together)
    for (const tile of order) {
      const clocks = line(recorded.points, rounds(tile));
      for (let k = Math.min(together, heads - head); k > 0; k--) start(free, clocks);
    }
  return free.reduce((a, b) => Math.max(a, b)) + (forward ? recorded.beside : 0);
}

// kernels.timing.ampere_time.clocks: what runs by default, head after head, the longest tile first.
function ampere_clocks(input, run, gpu, mask) {
  if (run.changed) return null;  // another kernel
  const recorded = AMPERE[`${input.pass} ${run.columns} ${mask}`];
  const same = recorded && recorded.block_m === run.block_m && recorded.block_n === run.block_n;
  const ours = input.pass === "forward" ? FLASH.includes(run.algorithm) : run.algorithm === "flash";
  if (!same || !ours || input.dtype === "fp32") return null;
  const { tiles, heads, rounds } = tile_loop(input, run);
  if (heads * tiles > 2e7) return null;
  const last_first = input.pass === "forward" && input.causal;
  let started = 0;
  return fill_shared(gpu.sms, recorded.blocks_per_sm, recorded.slowdown, () => {
    if (started === heads * tiles) return null;
    const place = started++ % tiles;
    return line(recorded.points, rounds(last_first ? tiles - 1 - place : place));
  });
}

// analysis.loop_model.card.fill_shared. next() gives a block's clocks, null when there are no more.
function fill_shared(sms, slots, slowdown, next) {
  const left = Array.from({ length: sms }, () => []);
  const take = (here) => {
    const block = next();
    if (block !== null) here.push(block);
  };
  for (let k = 0; k < slots; k++) left.forEach(take);
  const stretched = (here) =>
    Math.min(...here) * (1 + (slowdown - 1) * (slots > 1 ? (here.length - 1) / (slots - 1) : 0));
  let free = left.flatMap((here, sm) => (here.length ? [[stretched(here), sm]] : []));
  const before = ([t, i], [u, j]) => t < u || (t === u && i < j);
  free.sort((a, b) => (before(a, b) ? -1 : 1));
  let now = 0;
  while (free.length) {
    let sm;
    [now, sm] = free[0];
    const first = Math.min(...left[sm]);
    const staying = left[sm].filter((block) => block > first).map((block) => block - first);
    const gone = left[sm].length - staying.length;
    left[sm] = staying;
    for (let k = 0; k < gone; k++) take(left[sm]);
    if (left[sm].length) sift(free, [now + stretched(left[sm]), sm], before);
    else {
      const end = free.pop();
      if (free.length) sift(free, end, before);
    }
  }
  return now;
}

// Puts a value in the place of a heap's first.
function sift(heap, value, before) {
  let i = 0;
  for (;;) {
    let child = 2 * i + 1;
    if (child >= heap.length) break;
    if (child + 1 < heap.length && before(heap[child + 1], heap[child])) child++;
    if (!before(heap[child], value)) break;
    heap[i] = heap[child];
    i = child;
  }
  heap[i] = value;
}

// analysis.loop_model.card.through
function line(points, x) {
  let i = 1;
  while (i < points.length - 1 && x > points[i][0]) i++;
  const [[x0, y0], [x1, y1]] = [points[i - 1], points[i]];
  return y0 + (y1 - y0) * (x - x0) / (x1 - x0);
}

// analysis.loop_model.card.fill: a block on the SM that is free first. free is a heap.
function start(free, clocks) {
  sift(free, free[0] + clocks, (a, b) => a < b);
}

function scaled(value, unit) {
  for (const prefix of ["", "k", "M", "G", "T"]) {
    if (Math.abs(value) < 1000) return `${Number(value.toPrecision(4))} ${prefix}${unit}`;
    value /= 1000;
  }
  return `${Number(value.toPrecision(4))} P${unit}`;
}

function duration(seconds) {
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]])
    if (seconds >= size) return `${Number((seconds / size).toPrecision(3))} ${unit}`;
  return `${Number((seconds / 1e-9).toPrecision(3))} ns`;
}

// Fields of the form (figures.report.form) that are no plain numbers.
const WORDS = ["algorithm", "pass", "dtype", "gpu", "bias", "order", "ceilings"];
const OPTIONAL = ["block_m", "block_n", "window_left", "window_right"];
const CHECKS = ["causal", "softcap", "alibi"];

function attach(form, output) {
  const read = () => {
    const data = new FormData(form);
    const input = Object.fromEntries(CHECKS.map((name) => [name, data.has(name)]));
    for (const [name, value] of data) {
      if (CHECKS.includes(name)) continue;
      input[name] = WORDS.includes(name) ? value
        : OPTIONAL.includes(name) && value === "" ? null : Number(value);
    }
    return input;
  };
  const row = (name, shown, exact, note) => {
    const tr = document.createElement("tr");
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = name;
    const cell = document.createElement("td");
    cell.textContent = shown;
    if (exact !== undefined) { cell.dataset.value = exact; cell.title = String(exact); }
    const last = document.createElement("td");
    last.textContent = note || "";
    tr.append(head, cell, last);
    return tr;
  };
  const update = () => {
    const body = output.querySelector("tbody");
    const message = document.getElementById("calculator-message");
    let r;
    try {
      r = calculate(read());
    } catch (error) {
      body.replaceChildren();
      message.textContent = error.message;
      return;
    }
    message.textContent = "";
    const bytes = (x) => scaled(x, "B");
    const rate = (seconds) => `${Number((r.flops / seconds / 1e12).toPrecision(3))} TFLOP/s`;
    const gpu = GPUS[read().gpu];
    const blocks = `${r.blocks} blocks, ${r.blocks_per_sm} to an SM`;
    const rows = [row("kernel", r.form ? `${r.algorithm}, ${r.form}` : r.algorithm, undefined,
      r.theory ? `theory, run by none of our kernels: ${r.theory}` : r.reason),
      row("tile", `${r.block_m} x ${r.block_n}`, undefined, blocks +
        (r.idle_sms ? `: ${r.idle_sms} of ${gpu.sms} SMs idle` : "") +
        (r.spills ? "; registers spill, and those bytes are not counted" : "")),
      row("useful work", scaled(r.flops, "FLOP"), r.flops, r.columns === read().head_dim ? ""
        : `head_dim ${read().head_dim} is multiplied as ${r.columns} columns`),
      row("SM boundary", bytes(r.sm_bytes), r.sm_bytes, "what thread blocks load and store")];
    for (const [tensor, direction, count] of r.traffic)
      rows.push(row(`${tensor} ${direction}`, bytes(count), count));
    if (r.copy_bytes)
      rows.push(row("of which copies", bytes(r.copy_bytes), r.copy_bytes,
        `rows padded to ${r.head_dim}`));
    rows.push(
      row("HBM read", bytes(r.hbm_read_bytes), r.hbm_read_bytes, "each kernel's tensors once"),
      row("HBM write", bytes(r.hbm_write_bytes), r.hbm_write_bytes),
      row("saved for backward", bytes(r.saved_bytes), r.saved_bytes),
      row("peak", bytes(r.peak_bytes), r.peak_bytes, r.fits ? "" : "more than the GPU has"));
    for (const [name, seconds] of Object.entries(r.times))
      rows.push(row(`time at ${name}`, duration(seconds), seconds, name === r.binding ? "binds" : ""));
    rows.push(row("time bound", duration(r.seconds), r.seconds,
      `at most ${rate(r.seconds)}; ${r.ceilings}`));
    if (r.predicted)
      rows.push(row("predicted time", duration(r.predicted), r.predicted,
        `${rate(r.predicted)}; from machine code at ${gpu.clock / 1e9} GHz, ${gpu.clock_origin}`));
    body.replaceChildren(...rows);
  };
  const fill = () => {  // a link to a calculation: #calculator?algorithm=flash&...
    const query = location.hash.split("?")[1];
    if (!query) return;
    const wanted = new URLSearchParams(query);
    for (const element of form.elements) {
      if (!element.name) continue;
      if (element.type === "checkbox") element.checked = wanted.has(element.name);
      else if (wanted.has(element.name)) element.value = wanted.get(element.name);
    }
  };
  form.addEventListener("input", () => {
    update();
    const query = new URLSearchParams(new FormData(form)).toString();
    try { history.replaceState(null, "", `#calculator?${query}`); } catch { /* not in this viewer */ }
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", () => { fill(); update(); });
  fill();
  update();
}
