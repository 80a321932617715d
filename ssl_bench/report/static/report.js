"use strict";

// Sort a table by the column whose heading is clicked.
function sortKey(cell, isNumber) {
  const text = cell.dataset.v ?? cell.textContent.trim();
  if (!isNumber) return text;
  const number = Number.parseFloat(text);
  return Number.isNaN(number) ? null : number;
}

function sortTable(button) {
  const head = button.closest("th");
  const body = head.closest("table").tBodies[0];
  const column = head.cellIndex;
  const isNumber = !head.classList.contains("word");
  const descending = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const rows = [...body.rows].map((row) => [sortKey(row.cells[column], isNumber), row]);
  rows.sort(([one], [other]) => {
    // Empty cells stay at the bottom in both directions.
    if (one === null || other === null) return (one === null) - (other === null);
    const order = isNumber ? (one > other) - (one < other) : one.localeCompare(other, "en", { numeric: true });
    return descending ? -order : order;
  });
  body.append(...rows.map(([, row]) => row));
}

// Hide the panels that do not match the filters, and the curves that are unchecked.
function applyFilters(form) {
  const wanted = [...form.querySelectorAll("select[data-field]")].filter((s) => s.value !== "");
  let shown = 0;
  for (const item of document.querySelectorAll("[data-task]")) {
    item.hidden = wanted.some((select) => item.dataset[select.dataset.field] !== select.value);
    if (!item.hidden) shown += 1;
  }
  for (const group of document.querySelectorAll("[data-group]")) {
    group.hidden = !group.querySelector(".card:not([hidden])");
  }
  for (const box of form.querySelectorAll("input[data-model]")) {
    for (const item of document.querySelectorAll(`[data-m="${box.dataset.model}"]`)) {
      // SVG elements have no property `hidden`.
      item.toggleAttribute("hidden", !box.checked);
    }
  }
  // Open folds, because they may contain matching panels.
  for (const fold of document.querySelectorAll("details.fold")) {
    if (wanted.length) fold.open = true;
  }
  const all = document.querySelectorAll(".card[data-task]").length;
  document.getElementById("shown").textContent = `${shown} of ${all} panels shown`;
}

// Show the records behind a number in a dialog.
function addEntry(list, name, value) {
  const term = document.createElement("dt");
  const text = document.createElement("dd");
  term.textContent = name;
  text.textContent = typeof value === "object" && value !== null ? JSON.stringify(value) : String(value);
  list.append(term, text);
}

function showRecords(numbers) {
  const dialog = document.getElementById("provenance");
  const place = dialog.querySelector("div");
  place.replaceChildren();
  for (const number of numbers) {
    const list = document.createElement("dl");
    RECORDS.rows[number].forEach((index, field) => {
      const name = RECORDS.names[field];
      const value = RECORDS.values[index];
      if (name !== "settings" && name !== "details") addEntry(list, name, value);
      else for (const key of Object.keys(value)) addEntry(list, `${name}: ${key}`, value[key]);
    });
    place.append(list);
  }
  dialog.showModal();
  dialog.scrollTop = 0;
}

// Let readers choose an image and a block, which all encoders of the viewer then show.
function setUpViewer(viewer) {
  const data = JSON.parse(viewer.querySelector("script").textContent);
  const image = viewer.querySelector("select");
  const slider = viewer.querySelector("input");
  const output = viewer.querySelector("output");
  const show = () => {
    const block = slider ? Number(slider.value) : 0;
    const [name, file, width, height] = data.images[image ? image.selectedIndex : 0];
    const layer = data.layers.length ? `block ${data.layers[block]}` : "all blocks";
    if (output) output.textContent = String(data.layers[block]);
    if (slider) slider.setAttribute("aria-valuetext", layer);
    viewer.querySelectorAll("figure").forEach((figure, side) => {
      const address = data.sides[side].prefixes[block] + file;
      const picture = figure.querySelector("img");
      picture.width = width;
      picture.height = height;
      picture.src = address;
      picture.alt = `${data.sides[side].name}, ${data.what}, ${layer}, image ${name}`;
      figure.querySelector("a").href = address;
    });
  };
  const step = (by) => {
    image.selectedIndex = (image.selectedIndex + by + data.images.length) % data.images.length;
    show();
  };
  if (image) image.addEventListener("change", show);
  if (slider) slider.addEventListener("input", show);
  for (const button of viewer.querySelectorAll("button[data-step]")) {
    button.addEventListener("click", () => step(Number(button.dataset.step)));
  }
  // Update the pictures now, because browsers keep the choices after a reload.
  show();
}

// Show a clicked picture in a dialog. Small pictures are enlarged, large ones have full size.
function showPicture(link) {
  const dialog = document.getElementById("picture");
  const place = dialog.querySelector("div");
  const small = link.querySelector("img, svg");
  const large = document.createElement("img");
  const enlarge = () => {
    const room = place.clientWidth;
    large.width = Math.max(large.naturalWidth, Math.min(3 * large.naturalWidth, room));
  };
  large.addEventListener("load", enlarge);
  large.alt = small.getAttribute("alt") ?? small.getAttribute("aria-label");
  large.src = link.href;
  place.replaceChildren(large);
  dialog.querySelector("h2").textContent = large.alt;
  const alone = document.createElement("a");
  alone.href = link.href;
  alone.textContent = "Open only the picture";
  dialog.querySelector("p").replaceChildren(alone);
  dialog.showModal();
  place.scrollTo(0, 0);
}

// Mark tables that are wider than their container, and those with hidden columns to the right.
function markCut() {
  for (const place of document.querySelectorAll("main .scroll")) {
    place.classList.toggle("cut", place.scrollWidth > place.clientWidth + 1);
    const seen = place.scrollLeft + place.clientWidth;
    place.classList.toggle("more", place.scrollWidth > seen + 1);
  }
}
document.addEventListener("scroll", markCut, { capture: true, passive: true });
document.addEventListener("toggle", markCut, { capture: true });
window.addEventListener("resize", markCut);

// Highlight an encoder in all charts of the overview while the pointer is over its name or curve,
// or after its name is clicked.
const overview = document.getElementById("overview");
let pressed = null;
function focusOn(number) {
  overview.classList.toggle("focused", number !== null);
  for (const item of overview.querySelectorAll("[data-m]")) {
    item.classList.toggle("focus", item.dataset.m === number);
    if (item.matches("button")) item.setAttribute("aria-pressed", String(item.dataset.m === pressed));
  }
}
if (overview) {
  overview.addEventListener("pointerover", (event) => {
    if (event.pointerType === "mouse") focusOn(event.target.closest("[data-m]")?.dataset.m ?? pressed);
  });
  overview.addEventListener("pointerleave", () => focusOn(pressed));
}

// Open the folds around the target of a link.
function unfold() {
  const place = document.getElementById(location.hash.slice(1));
  if (!place) return;
  for (let e = place; e; e = e.parentElement) if (e.matches("details.fold")) e.open = true;
  place.scrollIntoView();
}
window.addEventListener("hashchange", unfold);

document.addEventListener("click", (event) => {
  const link = event.target.closest("a.zoom");
  if (link && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
    event.preventDefault();
    showPicture(link);
    return;
  }
  const button = event.target.closest("button");
  if (!button) return;
  if (button.matches("th button")) sortTable(button);
  else if (button.dataset.r) showRecords(button.dataset.r.split(" ").map(Number));
  else if (button.dataset.m) {
    pressed = button.dataset.m === pressed ? null : button.dataset.m;
    focusOn(pressed);
  }
  else if (button.id === "unfold") {
    const closed = button.getAttribute("aria-expanded") !== "true";
    for (const details of document.querySelectorAll("details.numbers")) details.open = closed;
    button.setAttribute("aria-expanded", String(closed));
  }
});
document.querySelectorAll(".viewer").forEach(setUpViewer);
const filters = document.getElementById("filters");
if (filters) {
  filters.addEventListener("change", () => applyFilters(filters));
  filters.addEventListener("reset", () => setTimeout(() => applyFilters(filters)));
  applyFilters(filters);
}
unfold();
markCut();
