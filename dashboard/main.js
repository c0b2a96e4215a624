// SPDX-License-Identifier: Apache-2.0
// The page: sections of GET /v1/live become figures and tables. They are drawn in parts, and not while the page is hidden.
import { Attention, Happened } from './attention.js'
import { benefit, drawHoldout } from './benefit.js'
import { Charts } from './charts.js'
import { Explain } from './explain.js'
import { Feed } from './feed.js'
import { soon } from './frames.js'
import { Table, clip, clock, count, exact, find, length, milliseconds, number, percent, plain, put, several, workerName } from './dom.js'
import { Workers, drawLeft } from './workers.js'

const data = {}
const sum = (list, of) => list.reduce((total, item) => total + (of(item) ?? 0), 0)
const tile = (field) => document.querySelector(`#tiles [data-field="${field}"]`)
const now = () => data.replica?.now_ms ?? Date.now()

// What a selection or a filter changes.
const selected = () => ['workers', 'left', 'happened', 'decisions', 'prefixes', 'benefit'].forEach(draw)

const charts = new Charts(find('charts'), (path) => feed.get(path), selected)
const attention = new Attention((text) => {
  charts.all()
  workers.filter(text)
  find(data.left?.some((l) => workerName(l, l.name) === text) ? 'left-section' : 'workers-section').scrollIntoView({ behavior: 'instant' })
  find('filter').focus({ preventScroll: true })
})
const workers = new Workers(attention, (model, group) => charts.shows(model, group), selected)
const happened = new Happened((e) => charts.shows(e.model) && workers.matches(() => [workerName(e, e.name), e.model ?? '', e.what, e.text]))

function drawWorkers(list) {
  workers.draw(list)
  const available = list.filter((w) => w.health === 'healthy' && !w.draining && !w.failing && !w.avoided_since).length
  put(tile('available'), count(available, { tone: available ? '' : 'bad' }))
  put(tile('workers'), count(list.length, { text: `of ${several(list.length, 'worker')}` }))
  const [active, pending] = [sum(list, (w) => w.active_requests), sum(list, (w) => w.pend_tokens)]
  put(tile('active_requests'), count(active))
  put(tile('pend_tokens'), count(pending, { text: `${number(pending)} tokens to compute` }))
  drawFirst()
}

const models = new Table(find('models'), 'Models', [
  { name: 'Model', field: 'model', show: (m) => plain(m.model, { title: m.names?.join(', ') }) },
  { name: 'Workers', field: 'workers', show: (m) => count(m.workers) },
  { name: 'Token ids', field: 'token_mode', left: true, show: (m) => plain(m.token_mode, { title: m.why ?? '' }) },
  { name: 'Checked', field: 'checks', left: true, show: (m) => plain(m.checks, { tone: ['differs', 'drift'].includes(m.checks) ? 'bad' : '' }) },
], (m) => m.model)

function drawModels(list) {
  models.fill(list, 'No model is known yet.')
  draw('benefit') // it says how many are left out
  drawFirst()
}

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
  if (!r.docs) return
  for (const link of document.querySelectorAll('[data-docs]')) {
    link.hidden = false
    if (link.getAttribute('href') !== r.docs + link.dataset.docs) link.href = r.docs + link.dataset.docs
  }
}

function drawTotals(t) {
  const share = t.prompt_tokens ? t.cached_tokens / t.prompt_tokens : undefined
  put(tile('requests'), count(t.requests))
  put(tile('failed'), count(t.failed, { text: `${number(t.failed)} failed`, tone: t.failed ? 'bad' : '' }))
  put(tile('cached_share'), share === undefined ? {} : { text: percent(share), value: share, share, title: String(share) })
  put(tile('prompt_tokens'), { text: `${number(t.cached_tokens)} of ${number(t.prompt_tokens)} prompt tokens`, value: t.prompt_tokens, title: `${exact(t.cached_tokens)} of ${exact(t.prompt_tokens)}` })
  drawFirst()
}

// A command that sends a chat. The name of the model is quoted for JSON and for a shell, in ASCII.
function command(model, question) {
  const messages = [
    { role: 'system', content: 'You help the readers of a small library. Answer in one short sentence, name the shelf of each book, and say so if the library does not have it.' },
    { role: 'user', content: question },
  ]
  const body = JSON.stringify({ model, max_tokens: 8, messages }).replace(/[^ -~]|'/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`)
  return `curl -s ${location.hostname.includes(':') ? '127.0.0.1' : location.hostname}:8080/v1/chat/completions -H 'content-type: application/json' -d '${body}'`
}

// drawFirst shows what to do while nobody has sent two requests.
function drawFirst() {
  const requests = data.totals?.requests
  const hidden = !data.totals || !data.workers || requests >= 2
  find('first').hidden = hidden
  if (hidden) return
  const model = data.models?.[0]?.model
  find('first-workers').hidden = data.workers.length > 0
  find('first-requests').hidden = data.workers.length === 0
  put(find('first-a'), { text: command(model ?? 'MODEL', 'Where do I find books on gardens?') })
  put(find('first-b'), { text: command(model ?? 'MODEL', 'Where do I find books on rivers?') })
  put(find('first-count'), { text: requests ? 'The first request has arrived. Send the second one.' : 'No request has arrived yet.', value: requests })
}

const firstToken = (d) => (d.first_token ? new Date(d.first_token) - new Date(d.time) : undefined)
const decisions = new Table(find('decisions'), 'Recent decisions, newest first', [
  { name: 'Request', field: 'id', open: true, show: (d) => plain(d.id.length > 22 ? `${d.id.slice(0, 6)}…${d.id.slice(-14)}` : d.id, { value: d.id, title: d.id }) },
  { name: 'Time', field: 'time', left: true, show: (d) => ({ text: clock(d.time), value: d.time }) },
  { name: 'Worker', field: 'worker', left: true, show: (d) => plain(workerName(d.worker, d.worker_name)) },
  { name: 'Why', field: 'reason', left: true, wrap: true, show: (d) => plain(clip(d.reason_text, 160), { value: d.reason, title: d.reason_text }) },
  { name: 'Cached blocks', field: 'overlap_blocks', show: (d) => count(d.overlap_blocks, { share: d.prompt_blocks ? d.overlap_blocks / d.prompt_blocks : undefined }) },
  { name: 'Prompt blocks', field: 'prompt_blocks', show: (d) => count(d.prompt_blocks) },
  { name: 'Tokens to compute', field: 'prefill_tokens', show: (d) => count(d.prefill_tokens) },
  { name: 'First token expected', field: 'expected_ttft_ms', show: (d) => (d.expected_ttft_ms === undefined ? { title: 'The first tokens of the worker were not measured yet, or it computes fewer than 256 tokens.' } : length(d.expected_ttft_ms)) },
  { name: 'First token', field: 'first_token', show: (d) => (firstToken(d) === undefined ? {} : { text: firstToken(d) > 0 ? milliseconds(firstToken(d)) : '< 1 ms', value: d.first_token, title: d.first_token_text ?? '' }) },
  { name: 'Model', field: 'model', left: true, show: (d) => plain(d.model) },
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
  if (!paused) decisions.fill(list.filter((d) => charts.shows(d.model, d.group ?? '')), list.length ? 'None of the newest decisions is of this model.' : 'No request was decided yet.')
}

frame.addEventListener('click', (event) => {
  const row = event.target.closest('tbody tr')
  if (row) explain.open(row.dataset.key)
})
find('search').addEventListener('submit', (event) => {
  event.preventDefault()
  const id = find('decision-id').value.trim()
  if (id) explain.open(id)
})

const prefixes = new Table(find('prefixes'), 'Prefixes as a tree: a row continues the row of the level above', [
  { name: 'Prefix', field: 'hash', show: (p) => ({ text: p.branch + p.hash.slice(0, 8), value: p.hash, title: p.hash }) },
  { name: 'Level', field: 'level', show: (p) => count(p.level) },
  { name: 'Model', field: 'model', left: true, show: (p) => plain(p.model) },
  { name: 'Blocks', field: 'blocks', show: (p) => count(p.blocks) },
  { name: 'Requests', field: 'requests', show: (p) => count(p.requests, { share: p.requests / p.most }) },
  { name: 'Workers', field: 'workers', show: (p) => count(p.workers) },
], (p) => `${p.model}/${p.hash}`)

function drawPrefixes(all) {
  const roots = all.filter((p) => charts.shows(p.model))
  const most = Math.max(1, ...roots.map((p) => p.requests))
  const flat = (list, level, indent) => list.flatMap((p, i) => {
    const last = i === list.length - 1
    const branch = level > 1 ? indent + (last ? '└ ' : '├ ') : ''
    return [{ ...p, level, branch, most }, ...flat(p.children ?? [], level + 1, level > 1 ? indent + (last ? '  ' : '│ ') : '')]
  })
  prefixes.fill(flat(roots, 1, ''), 'No two of the last requests begin alike.')
}

const mostSeries = 40 // models, or groups of a model, that kvroute keeps a history of

function drawBenefit(list) {
  charts.offer(list.map((b) => [b.model, b.group]))
  benefit.fill(list.filter((b) => charts.shows(b.model, b.group)), 'No request has ended yet.')
  const has = new Set(list.map((b) => b.model))
  const more = list.length < mostSeries ? 0 : (data.models ?? []).filter((m) => !has.has(m.model)).length
  find('benefit-more').hidden = more === 0
  put(find('benefit-more'), { value: more, text: `${several(more, 'more model')} left out here and in the selection below: kvroute keeps the figures of ${mostSeries}, the first ones with requests.` })
}

const drawers = {
  replica: drawReplica, attention: (list) => attention.draw(list, now()), benefit: drawBenefit, holdout: drawHoldout, totals: drawTotals, models: drawModels,
  workers: drawWorkers, left: (list) => drawLeft(list, (texts) => workers.matches(texts)), happened: (list) => happened.draw(list, now()),
  decisions: drawDecisions, prefixes: drawPrefixes, history: () => charts.draw(data.replica?.now_ms),
}
const parts = Object.fromEntries(Object.entries(drawers).map(([name, drawer]) => [name, () => data[name] && drawer(data[name])]))

// draw draws a section soon.
function draw(name) {
  soon(parts[name])
}

const feed = new Feed({
  begin: () => (charts.samples = []),
  section: (section, value) => {
    const name = section === 'events' ? 'happened' : section
    if (name === 'worker_charts') workers.charts = value.workers
    if (!drawers[name]) return
    if (name === 'history') charts.add(value)
    if (name === 'attention') attention.set(value)
    data[name] = value
    draw(name)
    if (name === 'attention') draw('workers') // its words are in the rows
    if (name === 'replica') ['history', 'attention'].forEach(draw) // its time moves on
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
drawHoldout()

find('login').addEventListener('submit', (event) => {
  event.preventDefault()
  feed.use(find('token').value.trim())
  find('token').value = ''
})
find('forget').addEventListener('click', () => location.reload()) // with the token go all figures
feed.run()
