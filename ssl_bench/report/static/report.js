"use strict";

// Sorting: the buttons in the heads of tables.
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
    // Empty cells stay below, whichever way the rest is sorted.
    if (one === null || other === null) return (one === null) - (other === null);
    const order = isNumber ? (one > other) - (one < other) : one.localeCompare(other, "en", { numeric: true });
    return descending ? -order : order;
  });
  body.append(...rows.map(([, row]) => row));
}

// Filtering: what does not match the choices is hidden, wherever it is shown.
function applyFilters(form) {
  const wanted = [...form.querySelectorAll("select[data-field]")].filter((s) => s.value !== "");
  let shown = 0;
  for (const item of document.querySelectorAll("[data-task]")) {
    item.hidden = wanted.some((select) => item.dataset[select.dataset.field] !== select.value);
    if (item.classList.contains("card") && !item.hidden) shown += 1;
  }
  for (const group of document.querySelectorAll("[data-group]")) {
    group.hidden = !group.querySelector(".card:not([hidden])");
  }
  for (const box of form.querySelectorAll("input[data-model]")) {
    for (const item of document.querySelectorAll(`[data-m="${box.dataset.model}"]`)) {
      // Parts of drawings have no property of this name.
      item.toggleAttribute("hidden", !box.checked);
    }
  }
  const all = document.querySelectorAll(".card[data-task]").length;
  document.getElementById("shown").textContent = `${shown} of ${all} panels shown`;
}

// Provenance: the numbers are buttons that open a dialog.
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
    RECORDS.rows[number].forEach((word, index) => {
      const name = RECORDS.names[index];
      const value = RECORDS.words[word];
      if (name !== "settings" && name !== "details") addEntry(list, name, value);
      else for (const key of Object.keys(value)) addEntry(list, `${name}: ${key}`, value[key]);
    });
    place.append(list);
  }
  dialog.showModal();
  dialog.scrollTop = 0;
}

// Viewers: an image and a block chosen, the same for all sides.
function setUpViewer(viewer) {
  const data = JSON.parse(viewer.querySelector("script").textContent);
  const image = viewer.querySelector("select");
  const slider = viewer.querySelector("input");
  const output = viewer.querySelector("output");
  const show = () => {
    const block = slider ? Number(slider.value) : 0;
    const [name, file] = data.images[image ? image.selectedIndex : 0];
    const layer = data.layers.length ? `block ${data.layers[block]}` : "all blocks";
    if (output) output.textContent = String(data.layers[block]);
    if (slider) slider.setAttribute("aria-valuetext", layer);
    viewer.querySelectorAll("figure").forEach((figure, side) => {
      const address = data.sides[side].prefixes[block] + file;
      const picture = figure.querySelector("img");
      picture.src = address;
      picture.alt = `${data.sides[side].name}, ${data.what}, ${layer}${name ? `, image ${name}` : ""}`;
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
  // Browsers keep choices over a reload.
  show();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.matches("th button")) sortTable(button);
  else if (button.dataset.r) showRecords(button.dataset.r.split(" ").map(Number));
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
