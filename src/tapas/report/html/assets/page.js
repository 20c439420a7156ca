// Brings the page to life: theme, which of two plans is shown, copying, and the pictures of each plan.

const views = JSON.parse(document.getElementById("data").textContent);
const charts = [];

function start(view) {
  const article = document.getElementById(`plan-${view.letter}`);
  if (view.blocks) new ModelGraph(article, view, new Details(article, view));
  new MeshPicture(article, view);
  for (const Chart of [MemoryChart, CurveChart, StreamsPicture]) {
    const chart = new Chart(article, view);
    if (chart.chart) charts.push(chart);
  }
}

// A plan is drawn when it is first seen: what is hidden has no width.
const started = new Set();
function show(letter) {
  for (const article of document.querySelectorAll("[data-plan]")) article.hidden = article.dataset.plan !== letter;
  for (const button of document.querySelectorAll("[data-show]")) button.setAttribute("aria-pressed", String(button.dataset.show === letter));
  if (!started.has(letter)) start(views.find((view) => view.letter === letter));
  started.add(letter);
}

const remembered = {
  get: () => { try { return localStorage.getItem("tapas-theme"); } catch { return null; } },
  set: (theme) => { try { localStorage.setItem("tapas-theme", theme); } catch { /* a page from a file may have none */ } },
};

function dress(theme) {
  document.documentElement.dataset.theme = theme;
  const button = document.getElementById("theme");
  button.setAttribute("aria-pressed", String(theme === "dark"));
  for (const chart of charts) chart.draw();
}

const dark = matchMedia("(prefers-color-scheme: dark)");
dress(remembered.get() ?? (dark.matches ? "dark" : "light"));
dark.addEventListener("change", (event) => remembered.get() ?? dress(event.matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  remembered.set(theme);
  dress(theme);
});

for (const button of document.querySelectorAll("[data-show]")) button.addEventListener("click", () => show(button.dataset.show));

for (const button of document.querySelectorAll(".copy-button")) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected: press Ctrl-C";
    }
  });
}

let resized;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => charts.forEach((chart) => chart.draw()), 150);
});

show(views[0].letter);
requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("tapas-drawn")));
