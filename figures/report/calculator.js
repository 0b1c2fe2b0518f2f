// The calculator: reads the form, evaluates MODEL (printed from SymPy), fills the table.
// Kept free of the page where it can be, so that it also runs under a bare JavaScript engine.

function calculate(input) {
  const fields = ["batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "block_m", "block_n"];
  for (const name of fields) {
    if (!Number.isInteger(input[name]) || input[name] < 1)
      throw new Error(`${name} = ${input[name]}: a whole number from 1 on is needed`);
  }
  if (input.heads % input.kv_heads)
    throw new Error(`heads = ${input.heads} is not a multiple of kv_heads = ${input.kv_heads}`);
  if (input.kv_heads !== input.heads && !GROUPED.includes(input.algorithm))
    throw new Error(`${input.algorithm} has as many key/value heads as query heads`);
  if (input.causal && input.seqlen_k < input.seqlen_q)
    throw new Error(`causal: seqlen_k = ${input.seqlen_k} is below seqlen_q = ${input.seqlen_q}`);
  refuse(input);
  if (Math.ceil(input.seqlen_q / input.block_m) > 1e7)
    throw new Error("more than ten million query tiles");
  const gpu = GPUS[input.gpu];
  const values = {
    B: input.batch, H: input.heads, H_k: input.kv_heads, N_q: input.seqlen_q, N_k: input.seqlen_k,
    d: input.head_dim, e: ITEMSIZE[input.dtype], B_r: input.block_m, B_c: input.block_n,
    F: gpu.F, X: gpu.X, S: gpu.S, W: gpu.W,
  };
  const mask = input.causal ? "causal" : "dense";
  for (const [symbol, total] of Object.entries(ROWS[mask])) values[symbol] = total(values);
  const model = MODEL[`${input.algorithm} ${input.pass}`];
  const traffic = model.traffic.map(([tensor, direction, f]) => [tensor, direction, f(values)])
    .filter(([, , bytes]) => bytes);
  const times = {};
  for (const [name, f] of Object.entries(model.times)) {
    if (name === "SM boundary" && !gpu.S) continue;  // that rate is not published
    times[name] = f(values);
  }
  const binding = Object.keys(times).reduce((a, b) => (times[b] > times[a] ? b : a));
  return {
    traffic,
    sm_bytes: traffic.reduce((sum, [, , bytes]) => sum + bytes, 0),
    hbm_read_bytes: model.hbm_read(values),
    hbm_write_bytes: model.hbm_write(values),
    saved_bytes: model.saved(values),
    peak_bytes: model.peak(values),
    fits: model.peak(values) <= gpu.memory,
    flops: model.flops[mask](values),
    times, binding, seconds: times[binding],
  };
}

// What repro.predict refuses: a type that the GPU lacks, and of the flash kernels head dimensions
// and tiles that they cannot have. Kernels take rows of a multiple of 8; others are copied first.
function refuse(input) {
  const reason = (REFUSED[input.gpu] || {})[`${input.algorithm} ${input.dtype}`];
  if (reason) throw new Error(reason);
  if (!FLASH.includes(input.algorithm)) return;
  const largest = HEAD_DIMS[HEAD_DIMS.length - 1];
  if (input.head_dim > largest)
    throw new Error(`head_dim = ${input.head_dim} is above ${largest}, the most of the flash kernels`);
  const columns = HEAD_DIMS.find((d) => d >= input.head_dim);
  const limit = GPUS[input.gpu].shared;
  const [i, j] = [BLOCKS.indexOf(input.block_m), BLOCKS.indexOf(input.block_n)];
  const tile = `tile ${input.block_m} x ${input.block_n}`;
  if (i < 0 || j < 0)
    throw new Error(`${tile}: the flash kernels take multiples of 16 up to ${BLOCKS[BLOCKS.length - 1]}`);
  const place = i * BLOCKS.length + j;
  const digit = parseInt(TILES[`${input.pass} ${input.dtype} ${columns} ${limit}`][place >> 2], 16);
  if (!((digit >> (3 - place % 4)) & 1))
    throw new Error(`${tile} does not fit the flash ${input.pass} at head_dim = ${input.head_dim} ` +
      `in ${input.dtype}: a block of ${input.gpu} has ${limit} bytes of shared memory`);
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

function attach(form, output) {
  const read = () => {
    const data = new FormData(form);
    const input = { causal: data.has("causal") };
    for (const [name, value] of data) {
      if (name === "causal") continue;
      input[name] = ["algorithm", "pass", "dtype", "gpu"].includes(name) ? value : Number(value);
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
    const rows = [row("useful work", scaled(r.flops, "FLOP"), r.flops),
      row("SM boundary", bytes(r.sm_bytes), r.sm_bytes, "what thread blocks load and store")];
    for (const [tensor, direction, count] of r.traffic)
      rows.push(row(`${tensor} ${direction}`, bytes(count), count));
    rows.push(
      row("HBM read", bytes(r.hbm_read_bytes), r.hbm_read_bytes, "each kernel's tensors once"),
      row("HBM write", bytes(r.hbm_write_bytes), r.hbm_write_bytes),
      row("saved for backward", bytes(r.saved_bytes), r.saved_bytes),
      row("peak", bytes(r.peak_bytes), r.peak_bytes, r.fits ? "" : "more than the GPU has"));
    for (const [name, seconds] of Object.entries(r.times))
      rows.push(row(`time at ${name}`, duration(seconds), seconds, name === r.binding ? "binds" : ""));
    rows.push(row("time bound", duration(r.seconds), r.seconds,
      "all SMs busy, ceilings overlapping"));
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
