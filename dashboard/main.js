// SPDX-License-Identifier: Apache-2.0
// The page: sections of GET /v1/live become figures and tables. Each section is drawn at most once a frame, and not while
// the page is hidden.
import { Charts } from './charts.js'
import { Explain } from './explain.js'
import { Feed } from './feed.js'
import { Table, clock, compact, count, element, find, milliseconds, number, percent, plain, put, workerName } from './dom.js'

const pageSize = 50
const data = {}
const sum = (list, of) => list.reduce((total, item) => total + (of(item) ?? 0), 0)
const tile = (field) => document.querySelector(`#tiles [data-field="${field}"]`)
const several = (n, one, many = `${one}s`) => `${number(n)} ${n === 1 ? one : many}`

const healths = { left: ['✕ left', 'bad'], unresolved: ['✕ no address', 'bad'], removed: ['○ removed', 'quiet'], healthy: ['● healthy', 'good'], degraded: ['▲ degraded', 'warn'], starting: ['▲ starting', 'warn'], unhealthy: ['✕ unhealthy', 'bad'], expired: ['✕ expired', 'bad'], not_ready: ['○ not ready', 'quiet'] }
const levels = { ok: ['●', 'good'], fault: ['▲', 'warn'], off: ['○', 'quiet'] } // of events, as the server judges them

function health(w) {
  const [text, tone] = healths[w.health] ?? [w.health, '']
  if (w.draining) return { text: '◌ draining', value: w.health, tone: 'quiet', title: `${w.health}; takes no new requests` }
  const faults = w.faults?.map((f) => `${f.what}: ${f.text}`).join('\n')
  if (faults) return { text: `${text}, ${[...new Set(w.faults.map((f) => f.what))].join(', ')}`, value: w.health, tone: 'bad', title: faults }
  if (w.failing) return { text: '▲ failing', value: w.health, tone: 'warn', title: `${w.health}; avoided because it failed lately` }
  return { text, value: w.health, tone }
}

function eventState(w) {
  const [symbol, tone] = levels[w.kv_events_level] ?? levels.off
  return { text: `${symbol} ${w.never_heard ? 'never heard' : w.kv_events}`, value: w.kv_events, tone, title: w.kv_events_text }
}

function audit(w) {
  const a = w.audit
  if (!a) return {}
  const title = `${number(a.cached_tokens)} tokens were cached, ${number(a.predicted_tokens)} were predicted, in ${several(a.responses, 'response')}`
  return { text: a.departs ? '▲ departs' : `● ${number(a.responses)} checked`, value: a.responses, tone: a.departs ? 'bad' : 'good', title }
}

const total = (w) => w.total_kv_blocks
const workers = new Table(find('workers'), 'Workers', [
  { name: 'Worker', field: 'name', show: (w) => plain(workerName(w, w.name), { title: `${w.address} id ${w.worker_id}` }) },
  { name: 'Model', field: 'model', left: true, show: (w) => plain(w.model) },
  { name: 'Health', field: 'health', left: true, show: health },
  { name: 'Active requests', field: 'active_requests', show: (w) => count(w.active_requests) },
  { name: 'Active blocks', field: 'active_blocks', show: (w) => count(w.active_blocks, total(w) && { share: w.active_blocks / total(w) }) },
  { name: 'Pending tokens', field: 'pend_tokens', show: (w) => count(w.pend_tokens) },
  {
    name: 'Cached blocks', field: 'cached_blocks',
    show: (w) => count(w.cached_blocks, { share: total(w) && w.cached_blocks / total(w), title: total(w) ? `of ${number(total(w))}` : '' }),
  },
  { name: 'Predicted', field: 'guessed_blocks', show: (w) => count(w.guessed_blocks, { title: 'Blocks that are predicted without events' }) },
  { name: 'KV events', field: 'kv_events', left: true, show: eventState },
  { name: 'Routed', field: 'routed', show: (w) => count(w.routed) },
  { name: 'Failures', field: 'failures', show: (w) => count(w.failures, { tone: w.failures > 0 ? 'bad' : '' }) },
  { name: 'Audit', field: 'audit', left: true, show: audit },
], (w) => `${w.worker_id}/${w.dp_rank}/${w.model}`)

// The order of the workers: a column, and 1 or -1. ranks has the place of each name; it is made again when the names change.
const names = new Intl.Collator('en', { numeric: true })
const order = { column: workers.columns[0], direction: 1, page: 0 }
let [ranked, ranks] = ['', new Map()]

function sorted(list) {
  const all = list.map((w) => workerName(w, w.name))
  if (all.join() !== ranked) {
    ranked = all.join()
    ranks = new Map(all.toSorted(names.compare).map((name, i) => [name, i]))
  }
  const { column } = order
  const rank = (w) => ranks.get(workerName(w, w.name))
  const key = column === workers.columns[0] ? rank : column.left ? (w) => column.show(w).text ?? '' : (w) => column.show(w).value ?? -1
  return list
    .map((w) => ({ w, key: key(w), rank: rank(w) }))
    .sort((a, b) => order.direction * (typeof a.key === 'number' ? a.key - b.key : names.compare(a.key, b.key)) || a.rank - b.rank)
    .map((item) => item.w)
}

workers.columns.forEach((column, i) => {
  const button = element('button', { type: 'button', className: 'sort' }, column.name)
  workers.heads[i].replaceChildren(button)
  button.addEventListener('click', () => {
    order.direction = order.column === column ? -order.direction : column.left || i === 0 ? 1 : -1 // figures: the largest first
    order.column = column
    draw('workers')
  })
})
find('filter').addEventListener('input', () => {
  order.page = 0
  draw('workers')
})
find('pager').addEventListener('click', (event) => {
  order.page += Number(event.target.value || 0)
  draw('workers')
})

function drawWorkers(list) {
  const wanted = find('filter').value.trim().toLowerCase()
  const text = (w) => [workerName(w, w.name), w.model, health(w).text, eventState(w).text, w.group].join('\n').toLowerCase()
  const shown = sorted(wanted ? list.filter((w) => text(w).includes(wanted)) : list)
  const pages = Math.max(1, Math.ceil(shown.length / pageSize))
  order.page = Math.max(0, Math.min(order.page, pages - 1))
  const first = order.page * pageSize
  workers.fill(shown.slice(first, first + pageSize), list.length ? 'No worker matches the filter.' : 'No worker is known yet. docs/workers.md describes how workers register.')
  workers.columns.forEach((column, i) => {
    const direction = column === order.column ? (order.direction > 0 ? 'ascending' : 'descending') : null
    if (workers.heads[i].ariaSort !== direction) workers.heads[i].ariaSort = direction
  })
  find('pager').hidden = pages === 1
  put(find('page'), { text: `${first + 1} to ${Math.min(first + pageSize, shown.length)} of ${number(shown.length)}`, value: shown.length })
  const [previous, next] = find('pager').querySelectorAll('button')
  previous.disabled = order.page === 0
  next.disabled = order.page === pages - 1

  const available = list.filter((w) => w.health === 'healthy' && !w.draining && !w.failing).length
  put(tile('available'), { text: number(available), value: available })
  put(tile('workers'), { text: `of ${several(list.length, 'worker')}`, value: list.length })
  const [active, pending] = [sum(list, (w) => w.active_requests), sum(list, (w) => w.pend_tokens)]
  put(tile('active_requests'), { text: number(active), value: active })
  put(tile('pend_tokens'), { text: `${compact(pending)} tokens to compute`, value: pending })
  drawEvents(list)
  drawGroups(list.filter((w) => w.group))
}

const eventTable = new Table(find('events'), 'Workers by event source and state', [
  { name: 'Source', field: 'transport', show: (g) => plain(g.transport) },
  { name: 'State', field: 'state', left: true, show: (g) => eventState(g.of) },
  { name: 'Workers', field: 'workers', show: (g) => count(g.workers) },
  { name: 'Cached blocks', field: 'cached_blocks', show: (g) => count(g.blocks) },
], (g) => `${g.transport}/${g.of.kv_events}/${g.of.never_heard ?? false}/${g.of.kv_events_level}`)

function drawEvents(list) {
  const kinds = new Map()
  for (const w of list) {
    const transport = w.group ? 'group summaries' : w.event_transport || 'not registered'
    const key = `${transport}/${w.kv_events}/${w.never_heard}/${w.kv_events_level}`
    const kind = kinds.get(key) ?? { transport, of: w, workers: 0, blocks: 0 }
    kind.workers++
    kind.blocks += w.cached_blocks
    kinds.set(key, kind)
  }
  eventTable.fill([...kinds.keys()].sort().map((key) => kinds.get(key)), 'No worker is known yet.')
}

const left = new Table(find('left'), 'Workers that left within the last hour, newest first', [
  { name: 'Worker', field: 'name', show: (l) => plain(workerName(l, l.name), { title: `id ${l.worker_id}` }) },
  { name: 'State', field: 'state', left: true, show: (l) => ({ text: healths[l.state]?.[0] ?? l.state, value: l.state, tone: healths[l.state]?.[1] ?? '', title: l.text }) },
  { name: 'When and why', field: 'text', left: true, show: (l) => plain(l.text) },
  { name: 'Before', field: 'last_state', left: true, show: (l) => plain(l.last_state) },
  { name: 'Requests lost', field: 'requests_lost', show: (l) => count(l.requests_lost, { tone: l.requests_lost > 0 ? 'bad' : '' }) },
  { name: 'Model', field: 'model', left: true, show: (l) => plain(l.models[0], { title: l.models.join(', ') }) },
  { name: 'Address', field: 'address', left: true, show: (l) => plain(l.address) },
], (l) => `${l.worker_id}/${l.left_at}`)

function drawLeft(list) {
  find('left-section').hidden = list.length === 0
  left.fill(list.slice(0, pageSize))
}

const groups = new Table(find('groups'), 'Router groups', [
  { name: 'Group', field: 'group', show: (w) => plain(w.group) },
  { name: 'Members', field: 'members', show: (w) => count(w.summary?.members) },
  { name: 'Busy', field: 'busy', show: (w) => count(w.summary?.busy) },
  { name: 'Queued', field: 'queued', show: (w) => count(w.summary?.queued) },
  { name: 'Summary', field: 'age_ns', left: true, show: (w) => (!w.summary ? {} : { text: w.summary.stale ? '▲ stale' : '● recent', value: w.summary.age_ns, tone: w.summary.stale ? 'warn' : 'good' }) },
], (w) => w.group)

function drawGroups(list) {
  find('groups-section').hidden = list.length === 0
  groups.fill(list)
}

const models = new Table(find('models'), 'Models', [
  { name: 'Model', field: 'model', show: (m) => plain(m.model, { title: m.names?.join(', ') }) },
  { name: 'Workers', field: 'workers', show: (m) => count(m.workers) },
  { name: 'Token ids', field: 'token_mode', left: true, show: (m) => plain(m.token_mode, { title: m.why ?? '' }) },
  { name: 'Checked', field: 'checks', left: true, show: (m) => plain(m.checks, { tone: ['differs', 'drift'].includes(m.checks) ? 'bad' : '' }) },
], (m) => m.model)

const replicas = new Table(find('replicas'), 'Router replicas', [
  { name: 'Replica', field: 'replica', show: (r) => plain(r.replica || r.router_id, { title: `id ${r.router_id}` }) },
  { name: 'Requests in flight', field: 'active_requests', show: (r) => count(r.active_requests) },
  { name: 'State', field: 'state', left: true, show: (r) => plain(r.state, { tone: r.tone }) },
], (r) => r.router_id)

function drawReplica(r) {
  const own = { ...r, state: r.synced ? '● this one' : '● this one, alone', tone: 'good' }
  replicas.fill([own, ...r.peers.map((p) => ({ ...p, state: p.whole ? '● in sync' : '▲ its list is requested', tone: p.whole ? 'good' : 'warn' }))])
  put(find('identity'), { text: [r.replica || r.router_id, r.version, r.scope, `since ${new Date(r.started_ms).toLocaleString('en-GB')}`].join(' · '), value: r.router_id })
  put(find('bus'), { text: r.bus ? '● connected to NATS' : '▲ not connected to NATS', value: r.bus, tone: r.bus ? 'good' : 'warn' })
  const tones = { ready: ['● ready', 'good'], degraded: ['▲ degraded', 'warn'] }
  const [text, tone] = tones[r.ready.status] ?? [`✕ ${r.ready.status}`, 'bad']
  put(find('ready'), { text, value: r.ready.status, tone })
}

// The problems: failed checks of /readyz, and workers that need a look.
const checks = {
  workers: 'No worker takes requests.',
  registry: 'The registry of workers cannot be read from NATS.',
  events: 'The stream of KV events is not read to its end: caches may be incomplete.',
  event_store: 'JetStream stores no KV events: a restarted replica cannot read them.',
}

function leftWorkers() {
  const lost = (data.left ?? []).filter((l) => l.state !== 'removed')
  const named = lost.slice(0, 5).map((l) => `${workerName(l, l.name)} ${l.text}`).join(', ')
  return lost.length ? [`${several(lost.length, 'worker')} left without a word, or have no address: ${named}${lost.length > 5 ? ', …' : ''}`] : []
}

function drawAttention() {
  const list = data.workers ?? []
  const some = (of, text) => {
    const found = list.filter(of)
    const named = found.slice(0, 5).map((w) => workerName(w, w.name)).join(', ')
    return found.length ? [`${several(found.length, 'worker')} ${text}: ${named}${found.length > 5 ? ', …' : ''}`] : []
  }
  const failed = Object.entries(data.replica?.ready.checks ?? {}).filter(([, ok]) => !ok)
  const problems = [
    ...failed.map(([name]) => `${name}: ${checks[name] ?? 'this check of /readyz fails.'}`),
    ...leftWorkers(),
    ...[...new Set(list.flatMap((w) => w.faults ?? []).map((f) => f.what))].flatMap((what) => {
      const texts = list.flatMap((w) => w.faults ?? []).filter((f) => f.what === what).map((f) => f.text)
      return some((w) => w.faults?.some((f) => f.what === what), `with the fault ${what} (${texts[0]})`)
    }),
    ...some((w) => w.health === 'unhealthy' || w.health === 'expired', 'unhealthy'),
    ...some((w) => w.health === 'degraded', 'degraded'),
    ...some((w) => w.failing, 'avoided because of failed requests'),
    ...[...new Set(list.map((w) => w.kv_events_level === 'fault' && w.kv_events_text))]
      .filter(Boolean)
      .flatMap((text) => some((w) => w.kv_events_level === 'fault' && w.kv_events_text === text, `with KV events that need attention (${text})`)),
    ...some((w) => w.audit?.departs, 'with other cached tokens than predicted'),
    ...(data.models ?? []).filter((m) => ['differs', 'drift'].includes(m.checks)).map((m) => {
      const differ = (m.classes ?? []).filter((c) => c.unconfirmed)
      const where = (c) => c.class + (c.position >= 0 ? ` at token ${c.position}` : ` in block ${c.block}`)
      return `Token ids of ${m.model} differ from those of its workers${differ.length ? `: ${differ.map(where).join(', ')}` : ''}.`
    }),
  ]
  const section = find('attention')
  section.hidden = problems.length === 0
  const items = section.querySelector('ul')
  while (items.children.length > problems.length) items.lastChild.remove()
  problems.forEach((text, i) => put(items.children[i] ?? items.appendChild(element('li')), { text }))
}

function drawTotals(t) {
  const [saved, share] = [t.cached_tokens - t.mean_cached_tokens, t.prompt_tokens ? t.cached_tokens / t.prompt_tokens : 0]
  put(tile('requests'), { text: compact(t.requests), value: t.requests })
  put(tile('failed'), { text: `${number(t.failed)} failed`, value: t.failed, tone: t.failed ? 'bad' : '' })
  put(tile('cached_share'), { text: percent(share), value: share, share })
  put(tile('prompt_tokens'), { text: `${compact(t.cached_tokens)} of ${compact(t.prompt_tokens)} prompt tokens`, value: t.prompt_tokens })
  put(tile('saved'), { text: `${compact(saved)} tokens`, value: saved })
}

const firstToken = (d) => (d.first_token ? new Date(d.first_token) - new Date(d.time) : undefined)
const decisions = new Table(find('decisions'), 'Recent decisions, newest first', [
  { name: 'Request', field: 'id', open: true, show: (d) => plain(d.id.length > 22 ? `${d.id.slice(0, 6)}…${d.id.slice(-14)}` : d.id, { value: d.id, title: d.id }) },
  { name: 'Time', field: 'time', left: true, show: (d) => ({ text: clock(d.time), value: d.time }) },
  { name: 'Model', field: 'model', left: true, show: (d) => plain(d.model) },
  { name: 'Worker', field: 'worker', left: true, show: (d) => plain(workerName(d.worker, d.worker_name)) },
  { name: 'Reason', field: 'reason', left: true, show: (d) => plain(d.reason, { title: d.reason_text }) },
  { name: 'Cached blocks', field: 'overlap_blocks', show: (d) => count(d.overlap_blocks, { share: d.prompt_blocks ? d.overlap_blocks / d.prompt_blocks : undefined }) },
  { name: 'Prompt blocks', field: 'prompt_blocks', show: (d) => count(d.prompt_blocks) },
  { name: 'Tokens to compute', field: 'prefill_tokens', show: (d) => count(d.prefill_tokens) },
  { name: 'First token expected', field: 'estimated_ttft_ms', show: (d) => ({ text: milliseconds(d.estimated_ttft_ms), value: d.estimated_ttft_ms }) },
  { name: 'First token', field: 'first_token', show: (d) => (firstToken(d) === undefined ? {} : { text: firstToken(d) > 0 ? milliseconds(firstToken(d)) : '< 1 ms', value: d.first_token, title: d.first_token_text ?? '' }) },
], (d) => d.id)

// The rows stay while a pointer or the focus is on them, so that nobody opens another decision than the intended one.
const frame = find('decisions').parentElement
const held = { pointer: false, focus: false }
frame.addEventListener('pointerenter', (event) => hold('pointer', event.pointerType === 'mouse'))
frame.addEventListener('pointerleave', () => hold('pointer', false))
frame.addEventListener('focusin', () => hold('focus', true))
frame.addEventListener('focusout', (event) => hold('focus', frame.contains(event.relatedTarget)))

function hold(by, is) {
  held[by] = is
  draw('decisions')
}

function drawDecisions(list) {
  const paused = (held.pointer || held.focus || explain.dialog.open) && decisions.body.rows.length > 0
  put(find('paused'), { text: paused ? 'Paused while the pointer or the focus is here' : '' })
  if (!paused) decisions.fill(list, 'No request was decided yet.')
}

frame.addEventListener('click', (event) => {
  const row = event.target.closest('tbody tr')
  if (row) explain.open(row.dataset.key)
})

const prefixes = new Table(find('prefixes'), 'Prefixes as a tree: a row continues the row of the level above', [
  { name: 'Prefix', field: 'hash', show: (p) => ({ text: p.branch + p.hash.slice(0, 8), value: p.hash, title: p.hash }) },
  { name: 'Level', field: 'level', show: (p) => count(p.level) },
  { name: 'Model', field: 'model', left: true, show: (p) => plain(p.model) },
  { name: 'Blocks', field: 'blocks', show: (p) => count(p.blocks) },
  { name: 'Requests', field: 'requests', show: (p) => count(p.requests, { share: p.requests / p.most }) },
  { name: 'Workers', field: 'workers', show: (p) => count(p.workers) },
], (p) => `${p.model}/${p.hash}`)

function drawPrefixes(roots) {
  const most = Math.max(1, ...roots.map((p) => p.requests))
  const flat = (list, level, indent) => list.flatMap((p, i) => {
    const last = i === list.length - 1
    const branch = level > 1 ? indent + (last ? '└ ' : '├ ') : ''
    return [{ ...p, level, branch, most }, ...flat(p.children ?? [], level + 1, level > 1 ? indent + (last ? '  ' : '│ ') : '')]
  })
  prefixes.fill(flat(roots, 1, ''), 'No two of the last requests begin alike.')
}

const charts = new Charts(find('charts'))
const drawers = {
  replica: drawReplica, workers: drawWorkers, left: drawLeft, models: (list) => models.fill(list, 'No model is known yet.'), totals: drawTotals,
  decisions: drawDecisions, prefixes: drawPrefixes, history: () => charts.draw(data.replica?.now_ms),
}
const changed = new Set()

function draw(name) {
  if (changed.size === 0) requestAnimationFrame(update)
  changed.add(name)
}

function update() {
  const start = performance.now()
  for (const name of changed) if (data[name]) drawers[name](data[name])
  drawAttention()
  changed.clear()
  performance.measure('update', { start })
  if (performance.getEntriesByName('update').length > 500) performance.clearMeasures()
}

const feed = new Feed({
  begin: () => (charts.samples = []),
  section: (name, value) => {
    if (!drawers[name]) return
    if (name === 'history') charts.add(value)
    data[name] = value
    draw(name)
    if (name === 'replica') draw('history') // its time moves on
  },
  state: (name, detail) => {
    const shown = { connecting: ['○ connecting', 'quiet'], live: ['● live', 'good'], waiting: [`▲ not connected: ${detail}`, 'warn'], login: ['○ token required', 'quiet'] }
    put(find('connection'), { text: shown[name][0], value: name, tone: shown[name][1] })
    document.body.classList.toggle('old', name === 'waiting')
    if (name !== 'live' && name !== 'login') return
    find('main').hidden = name === 'login'
    find('login').hidden = name !== 'login'
    find('forget').hidden = !feed.hasToken
    find('login-error').textContent = detail
    if (name === 'login') find('token').focus()
    if (name === 'login') explain.dialog.close()
  },
})
const explain = new Explain((path) => feed.get(path))
explain.dialog.addEventListener('close', () => draw('decisions'))

find('login').addEventListener('submit', (event) => {
  event.preventDefault()
  feed.use(find('token').value.trim())
  find('token').value = ''
})
find('forget').addEventListener('click', () => location.reload()) // with the token go all figures
feed.run()
