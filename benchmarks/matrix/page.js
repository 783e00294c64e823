const byId = (name) => document.getElementById(name);
const STATES = JSON.parse(byId('states').textContent);   // letter → [symbol, name, about]
const CAUSES = JSON.parse(byId('causes').textContent);
const BAD = 'fwdxct';
const grid = document.querySelector('.grid');
const panel = byId('panel');
const hiding = document.head.appendChild(document.createElement('style'));

// --- the model: columns and rows of the table ----------------------------------------------------

const columns = [...document.querySelectorAll('.rules th')].map((th, i) => ({
  th, i, rule: th.dataset.name, level: th.dataset.level, whole: th.classList.contains('sum'),
}));
let number = 0;  // of a rule in the packed details, where whole levels have no place
for (const column of columns) column.place = column.whole ? -1 : number++;
const rows = [...document.querySelectorAll('tr[data-dtype]')].map((tr) => {
  const { target, project, block } = tr.parentNode.dataset;
  const { dtype, device } = tr.dataset;
  const label = device === 'CPU' ? dtype : `${dtype} ${device}`;
  const cells = [...tr.querySelectorAll('td')];
  const wide = cells[0].classList.contains('wide') ? cells[0] : null;
  const place = [...tr.parentNode.querySelectorAll('tr[data-dtype]')].indexOf(tr);
  return { tr, target, project, block, dtype, device, label, cells, wide, place, shown: true };
});
const folded = new Set();
let shownColumns = columns;

const cellOf = (row, column) => row.wide || row.cells[column.i];
const stateOf = (row, column) => cellOf(row, column).classList[0];
const ratioOf = (cell) => cell.querySelector('i')?.textContent || '';

function inWords(cell) {
  const [, name] = STATES[cell.classList[0]];
  const ratio = cell.classList.contains('wide') ? '' : ratioOf(cell);
  if (ratio === '∞') return `${name} (NaN or infinite)`;
  return name + (ratio && ` (${ratio} × tolerance)`);
}

for (const row of rows) {
  if (row.wide) { row.wide.setAttribute('aria-label', row.wide.textContent); continue; }
  for (const column of columns) {
    const cell = row.cells[column.i];
    const name = column.whole ? `level ${column.level}` : column.rule;
    const what = column.whole ? `${STATES[cell.classList[0]][1]} ${ratioOf(cell)}` : inWords(cell);
    cell.setAttribute('aria-label', `${row.target} ${row.label}, ${name}: ${what}`);
  }
}

// --- filters -------------------------------------------------------------------------------------

function differs(column, shown) {
  return new Set(shown.map((row) => stateOf(row, column))).size > 1;
}

function apply() {
  const value = (name) => byId(name).value;
  const part = (name) => value(name).trim().toLowerCase();
  const pair = [value('compare'), value('with')].filter(Boolean);
  for (const row of rows) {
    row.shown = (!value('project') || row.project === value('project'))
      && row.target.toLowerCase().includes(part('target'))
      && (!value('dtype') || row.dtype === value('dtype'))
      && (!value('device') || row.device === value('device'))
      && (pair.length < 2 || pair.includes(row.target));
    row.tr.hidden = !row.shown;
  }
  for (const body of document.querySelectorAll('tbody')) {
    const inside = body.className === 'target'
      ? (row) => row.target === body.dataset.target : (row) => row.project === body.dataset.project;
    body.hidden = !rows.some((row) => row.shown && inside(row));
  }
  const shown = rows.filter((row) => row.shown);
  const only = byId('only').checked;
  const wanted = (column) => (!value('level') || column.level === value('level'))
    && (column.whole || (column.rule.includes(part('rule')) && (!only || differs(column, shown))));
  const rulesIn = (level) => columns.filter((c) => c.level === level && !c.whole && wanted(c));
  shownColumns = columns.filter((column) => wanted(column) && (column.whole
    ? folded.has(column.level) && rulesIn(column.level).length > 0 : !folded.has(column.level)));
  hideColumns();
  const rules = columns.filter((c) => !c.whole && wanted(c)).length;
  byId('count').textContent = `${shown.length} of ${rows.length} rows, `
    + `${rules} of ${number} rules`;
  compare(pair);
}

function hideColumns() {
  const shown = new Set(shownColumns);
  const rules = columns.filter((column) => !shown.has(column)).map(({ i }) =>
    `.rules > th:nth-child(${i + 1}), tr[data-dtype] > td:nth-child(${i + 2}):not(.wide)`);
  hiding.textContent = (rules.length ? `${rules.join(', ')} { display: none !important; }` : '')
    + '.grid .sum { display: table-cell; }';
  for (const th of document.querySelectorAll('.levels th[data-level]')) {
    const span = shownColumns.filter((column) => column.level === th.dataset.level).length;
    th.hidden = span === 0;
    th.colSpan = Math.max(span, 1);
    th.firstChild.setAttribute('aria-expanded', String(!folded.has(th.dataset.level)));
  }
  const width = Math.max(shownColumns.length, 1);
  for (const cell of document.querySelectorAll('.wide')) cell.colSpan = width;
  for (const cell of document.querySelectorAll('th[scope="rowgroup"]')) cell.colSpan = width + 1;
}

// --- two targets, or two versions ------------------------------------------------------------------

const element = (name, text = '', className = '') =>
  Object.assign(document.createElement(name), { textContent: text, className });

function wordsOf(target) {
  const body = document.querySelector(`tbody[data-target="${CSS.escape(target)}"]`);
  return body.querySelector('.words').textContent.split('; ').filter(Boolean);
}

function differences(first, second) {
  const found = [];
  for (const one of rows.filter((row) => row.target === first && row.shown)) {
    const other = rows.find((x) => x.target === second && x.label === one.label && x.shown);
    if (!other) continue;
    for (const column of columns.filter((c) => !c.whole)) {
      const [a, b] = [cellOf(one, column), cellOf(other, column)];
      const same = a.classList[0] === b.classList[0] && a.dataset.c === b.dataset.c;
      if (!same) found.push({ rule: column.rule, dtype: one.label, a, b });
    }
  }
  return found;
}

function compare(pair) {
  const place = byId('differences');
  place.hidden = pair.length < 2 || pair[0] === pair[1];
  place.replaceChildren();
  if (place.hidden) return;
  const [first, second] = pair;
  place.append(element('h2', `What differs: ${first} and ${second}`));
  for (const [one, other] of [[first, second], [second, first]]) {
    const others = wordsOf(other);
    const own = wordsOf(one).filter((text) => !others.includes(text));
    if (own.length) place.append(element('p', `Only ${one}: ${own.join('; ')}.`));
  }
  const found = differences(first, second);
  const names = (list) => [...new Set(list.map(({ rule }) => rule))].join(', ');
  const bad = (cell) => BAD.includes(cell.classList[0]);
  const lost = found.filter(({ a, b }) => !bad(a) && bad(b));
  const won = found.filter(({ a, b }) => bad(a) && !bad(b));
  if (lost.length) place.append(element('p', `${second} breaks, and ${first} does not: ${names(lost)}.`));
  if (won.length) place.append(element('p', `${first} breaks, and ${second} does not: ${names(won)}.`));
  if (!found.length) place.append(element('p', 'No cell differs in the dtypes that both have.'));
  else {
    found.sort((x, y) => (bad(y.a) || bad(y.b)) - (bad(x.a) || bad(x.b)));  // stable
    place.append(differenceTable(found, first, second));
  }
}

function differenceTable(found, first, second) {
  const table = element('table');
  const head = table.createTHead().insertRow();
  for (const text of ['rule', 'dtype', first, second]) head.append(element('th', text));
  const body = table.createTBody();
  for (const { rule, dtype, a, b } of found) {
    const row = body.insertRow();
    row.append(element('th', rule), element('td', dtype));
    for (const cell of [a, b]) {
      const place = element('td');
      const cause = cell.dataset.c === undefined ? '' : `: ${CAUSES[cell.dataset.c]}`;
      place.append(element('span', STATES[cell.classList[0]][0], `state ${cell.classList[0]}`),
        ` ${inWords(cell)}${cause}`);
      row.append(place);
    }
  }
  return table;
}

// --- the panel -------------------------------------------------------------------------------------

const blocks = new Map();

async function blockOf(index) {
  if (!blocks.has(index)) {
    const packed = atob(byId(`block-${index}`).textContent);
    const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
    blocks.set(index, await new Response(stream).json());
  }
  return blocks.get(index);
}

let opened = null;

function show(title, parts, html, origin) {
  opened = origin;
  byId('panel-title').textContent = title;
  const details = element('div');
  details.innerHTML = html;  // made by npattn, every text of others escaped
  byId('panel-body').replaceChildren(...parts, details);
  const failure = Boolean(origin.closest('td'));
  for (const name of ['before', 'after']) byId(name).hidden = !failure;
  if (!panel.open) panel.showModal();
  panel.scrollTop = 0;
}

async function openCell(row, column) {
  const cell = cellOf(row, column);
  if (row.wide) return openTarget(row.tr.parentNode);
  if (column.whole) return fold(column.level);
  const { cells } = await blockOf(row.block);
  const [symbol] = STATES[cell.classList[0]];
  const state = element('p');
  state.append(element('span', `${symbol} ${inWords(cell)}`, `state ${cell.classList[0]}`));
  const about = element('p', `${column.th.dataset.about} [semantics ${column.th.dataset.section}]`,
    'about');
  show(`${row.target} ${row.label}: ${column.rule}`, [state, about],
    cells[row.place][column.place], cell);
  mark(row.target, row.label, column.rule, column.level);
}

async function openTarget(body) {
  const { target } = await blockOf(body.dataset.block);
  show(body.dataset.target, [], target, body.querySelector('button'));
  mark(body.dataset.target);
}

function openRule(column) {
  const { about, section, level } = column.th.dataset;
  const parts = [element('p', `${about} [semantics ${section}; level ${level}]`)];
  const runs = rows.filter((row) => !row.wide);
  for (const [letter, [symbol, name]] of Object.entries(STATES)) {
    const those = runs.filter((row) => stateOf(row, column) === letter);
    if (!those.length) continue;
    const line = element('p');
    line.append(element('span', `${symbol} ${name}`, `state ${letter}`), ` ${those.length}: `
      + those.map((row) => `${row.target} ${row.label}`).join(', '));
    parts.push(line);
  }
  show(column.rule, parts, '', column.th.firstChild);
}

function mark(...words) {
  history.replaceState(null, '', `#${words.map(encodeURIComponent).join('/')}`);
}

function step(direction) {
  const failing = rows.filter((row) => row.shown && !row.wide).flatMap((row) => columns
    .filter((column) => !column.whole && BAD.includes(stateOf(row, column)))
    .map((column) => [row, column]));
  if (!failing.length) return;
  const order = (row, column) => rows.indexOf(row) * columns.length + column.i;
  const row = rows.find((x) => x.cells.includes(opened));
  const now = order(row, columns[row.cells.indexOf(opened)]);
  const rest = direction > 0 ? failing.find((at) => order(...at) > now)
    : failing.findLast((at) => order(...at) < now);
  openCell(...(rest || failing.at(direction > 0 ? 0 : -1)));
}

panel.addEventListener('close', () => {
  history.replaceState(null, '', location.pathname + location.search);
  if (opened) focusOn(opened);
});
panel.addEventListener('click', (event) => { if (event.target === panel) panel.close(); });
byId('close').addEventListener('click', () => panel.close());
byId('before').addEventListener('click', () => step(-1));
byId('after').addEventListener('click', () => step(1));

// --- mouse and keyboard ------------------------------------------------------------------------------

function fold(level) {
  if (!folded.delete(level)) folded.add(level);
  apply();
}

function activate(place) {
  const th = place.closest('th');
  if (th?.dataset.name) return openRule(columns.find((column) => column.th === th));
  if (th?.dataset.level) return fold(th.dataset.level);
  if (th) return openTarget(th.closest('tbody'));
  const row = rows.find((x) => x.tr === place.closest('tr'));
  return openCell(row, columns[Math.max(row.cells.indexOf(place.closest('td')), 0)]);
}

grid.addEventListener('click', (event) => {
  const place = event.target.closest('td, button');
  if (place) { focusOn(place); activate(place); }
});

// One stop of the tab key for the whole table; arrows move inside it.
let anchor = null;

function focusOn(place) {
  anchor?.setAttribute('tabindex', '-1');
  place.setAttribute('tabindex', '0');
  anchor = place;
  place.focus({ preventScroll: false });
}

function lines() {
  const heads = [...document.querySelectorAll('.levels th:not([hidden]) button')];
  const names = shownColumns.map(({ th }) => th.firstElementChild || th);
  const result = [heads, names];
  let last = null;
  for (const row of rows.filter((x) => x.shown)) {
    if (row.target !== last) result.push([row.tr.parentNode.querySelector('.name button')]);
    last = row.target;
    result.push(row.wide ? [row.wide] : shownColumns.map((column) => row.cells[column.i]));
  }
  return result;
}

const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
let wantedColumn = 0;

grid.addEventListener('keydown', (event) => {
  if (['Enter', ' '].includes(event.key) && event.target.tagName === 'TD') {
    event.preventDefault();
    activate(event.target);
  }
  const known = event.key in STEPS || ['Home', 'End'].includes(event.key);
  if (!known || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  const all = lines();
  const line = all.findIndex((places) => places.includes(event.target));
  if (line < 0) return;
  const at = all[line].indexOf(event.target);
  const [down, right] = STEPS[event.key] || [0, 0];
  const next = all[Math.min(Math.max(line + down, 0), all.length - 1)];
  let goal = down ? wantedColumn : at + right;
  if (event.key === 'Home') goal = 0;
  if (event.key === 'End') goal = next.length - 1;
  if (!down) wantedColumn = Math.max(goal, 0);
  focusOn(next[Math.min(Math.max(goal, 0), next.length - 1)]);
});

for (const place of grid.querySelectorAll('button')) place.setAttribute('tabindex', '-1');

const form = document.querySelector('form');
form.addEventListener('input', (event) => {
  const pair = [byId('compare').value, byId('with').value];
  if (['compare', 'with'].includes(event.target.id) && pair.every(Boolean)) {
    byId('only').checked = true;
    folded.clear();
    mark('compare', ...pair);
  }
  if (['only', 'rule', 'level'].includes(event.target.id)) folded.clear();
  apply();
});
form.addEventListener('submit', (event) => event.preventDefault());
form.addEventListener('reset', () => setTimeout(() => { mark(); apply(); }));

// --- the beginning -----------------------------------------------------------------------------------

function follow() {
  const words = location.hash.slice(1).split('/').map(decodeURIComponent);
  if (words[0] === 'compare' && words.length === 3) {
    [byId('compare').value, byId('with').value] = words.slice(1);
    byId('only').checked = true;
    folded.clear();
    return apply();
  }
  const row = rows.find((x) => x.target === words[0] && (!words[1] || x.label === words[1]));
  if (!row) return undefined;
  const column = columns.find((x) => !x.whole && x.rule === words[2]
    && (!words[3] || x.level === words[3]));
  return column ? openCell(row, column) : openTarget(row.tr.parentNode);
}

if (innerWidth < 700) {
  for (const { level } of columns) folded.add(level);
  for (const one of document.querySelectorAll('main > details')) one.open = false;
}
apply();
focusFirst();
follow();
addEventListener('hashchange', follow);

function focusFirst() {
  const first = shownColumns.length && rows.find((row) => row.shown);
  if (!first) return;
  anchor = cellOf(first, shownColumns[0]);
  anchor.setAttribute('tabindex', '0');
}
