// The views: each is a function of its data and its address. Everything that a model or a tool wrote goes through Text.
'use strict'

const link = (path, query) => {
  const pairs = Object.entries(query || {}).filter(([, v]) => v !== '' && v !== null && v !== undefined)
  return '#/' + path.map(encodeURIComponent).join('/') + (pairs.length ? '?' + new URLSearchParams(pairs) : '')
}
const EMBEDDED = window.AGENTRL_REPORT || null
async function get(path, query) {
  const pairs = Object.entries(query || {}).filter(([, v]) => v !== '' && v !== null && v !== undefined)
  const address = path.map(encodeURIComponent).join('/') + (pairs.length ? '?' + new URLSearchParams(pairs) : '')
  if (EMBEDDED) {
    if (EMBEDDED[address] === undefined) throw new Error('this is not in the report; open the run with `agentrl view`')
    return EMBEDDED[address]
  }
  const answer = await fetch('api/' + address)
  const data = await answer.json().catch(() => ({ error: `the viewer answered ${answer.status}` }))
  if (!answer.ok) throw new Error(data.error || `the viewer answered ${answer.status}`)
  return data
}
function useData(path, query, beat) {
  const [state, set] = useState({})
  const address = JSON.stringify([path, query])
  useEffect(() => {
    let current = true
    get(path, query).then(data => current && set({ data, address }), error => current && set({ error, address }))
    return () => { current = false }
  }, [address, beat])
  return state.address === address ? state : { ...state, old: true }
}
const Loading = ({ state }) => state.error ? html`<p class="error" role="alert">${state.error.message}</p>` : html`<p class="empty">Loading …</p>`

// Marks that would turn, hide or overwrite what stands beside them are shown by their numbers.
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffc\ufffe\uffff\ud800-\udfff]|[\u{e0000}-\u{e0fff}]/u
const CONTROLS = new RegExp(`(${CONTROL.source})`, 'gu')
const mark = c => `U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, '0')}`
const pieces = text => CONTROL.test(text) ? text.split(CONTROLS).map((p, n) => n % 2 ? html`<span class="ctrl" key=${n}>${mark(p)}</span>` : p) : text
const FIRST = 20000
function Text({ value, first = FIRST }) {
  const [shown, setShown] = useState(first)
  const text = String(value ?? '')
  const cut = text.slice(0, shown)
  return html`<pre class="text">${pieces(cut)}</pre>${text.length > shown ? html`<button onClick=${() => setShown(shown + 200000)}>show more (${text.length.toLocaleString('en')} characters in all)</button>` : ''}`
}

const shade = score => score === null || score === undefined ? 'warn' : score === 1 ? 'good' : score === 0 ? 'bad' : 'info'
const Score = ({ value }) => html`<span class=${`pill ${shade(value)}`}>${value === null || value === undefined ? 'no score' : number(value)}</span>`
const Fate = ({ row }) => row.kind === 'eval' ? html`<span class="pill info">eval ${row.stage}</span>`
  : row.kept === 1 ? html`<span class="pill good">kept</span>` : row.kept === 0 ? html`<span class="pill" title=${row.reason}>dropped: ${row.reason}</span>` : html`<span class="soft">–</span>`
const State = ({ value }) => html`<span class=${`pill ${value === 'running' ? 'good' : value === 'done' ? 'info' : ''}`}>${value}</span>`
const interval = p => p ? html`<b>${number(p.value)}</b> <small>[${number(p.low)}, ${number(p.high)}]</small>` : '–'
const when = t => t ? new Date(t * 1000).toISOString().slice(0, 16).replace('T', ' ') : '–'

function RunsView({ beat }) {
  const state = useData(['runs'], {}, beat)
  const [chosen, choose] = useState([])
  if (!state.data) return html`<${Loading} state=${state} />`
  const { runs } = state.data
  const toggle = id => choose(chosen.includes(id) ? chosen.filter(x => x !== id) : [...chosen, id].slice(-2))
  return html`<div class="title"><h1>Runs</h1><small>${runs.length}</small><span class="right"><a class="pill info" href=${chosen.length === 2 ? link(['compare', ...chosen]) : null} aria-disabled=${chosen.length !== 2}>${chosen.length === 2 ? 'compare the two' : 'tick two runs to compare them'}</a></span></div>
  <div class="card scroll"><table><thead><tr><th></th><th>run</th><th>state</th><th>step</th><th class="hide">score by step</th><th>score</th><th>held-out pass@1</th><th class="hide">environments</th><th class="hide">model</th><th class="hide">time</th><th>alarms</th></tr></thead><tbody>
  ${runs.map(r => html`<tr key=${r.id}><td><input type="checkbox" aria-label=${`compare ${r.id}`} checked=${chosen.includes(r.id)} onChange=${() => toggle(r.id)} /></td>
    <td><a href=${link(['run', r.id])}><b>${r.id}</b></a></td><td><${State} value=${r.state} /></td>
    <td class="num">${r.step}${r.steps ? ` / ${r.steps}` : ''}</td><td class="hide"><${Spark} values=${r.scores} /></td><td class="num">${number(r.score)}</td>
    <td>${r.heldout.map(e => html`<div key=${e.env}>${r.heldout.length > 1 ? e.env + ' ' : ''}${interval(e['pass@1'])}</div>`)}</td>
    <td class="hide">${r.envs.join(', ')}</td><td class="hide">${r.model}</td><td class="num hide">${seconds(r.seconds)}</td><td>${r.alarms ? html`<span class="pill warn">${r.alarms}</span>` : ''}</td></tr>`)}
  </tbody></table></div>`
}

function evalSeries(evals, env) {
  const rows = evals.filter(e => e.env === env && e.stage !== 'start' || e.env === env && !evals.some(o => o.env === env && o.step === e.step && o.stage === 'sft'))
  return [...new Map(rows.map(e => [e.step, e])).values()].sort((a, b) => a.step - b.step)
}
const STAGE = { start: 'untrained', sft: 'warm start', rl: 'during RL', end: 'end' }

function HeldOut({ evals, run }) {
  const envs = [...new Set(evals.map(e => e.env))]
  if (!envs.length) return html`<p class="soft">No evaluation yet.</p>`
  const x = [...new Set(evals.map(e => e.step))].sort((a, b) => a - b)
  const series = [], bands = []
  envs.forEach((env, n) => {
    const at = new Map(evalSeries(evals, env).map(e => [e.step, e['pass@1']]))
    const part = name => x.map(s => at.get(s) ? at.get(s)[name] : null)
    series.push({ label: env, values: part('value'), color: COLORS[n % COLORS.length] }, { label: env + ' high', values: part('high'), hidden: true }, { label: env + ' low', values: part('low'), hidden: true })
    bands.push([3 * n + 2, 3 * n + 3, n])
  })
  const levels = [...new Set(evals.flatMap(e => Object.keys(e.levels || {})))].sort((a, b) => a - b)
  return html`<div class="even"><${Chart} title="held-out pass@1, with its 95 % interval" x=${x} series=${series} bands=${bands} points=${true} range=${[0, 1]} height=${220} />
  <div class="card scroll heat tall" tabindex="0"><table><thead><tr><th>evaluation</th><th>pass@1</th>${levels.map(l => html`<th class="num" key=${l}>level ${l}</th>`)}<th class="num hide">tasks</th><th class="num hide">cut off</th><th class="num hide">ungraded</th></tr></thead><tbody>
  ${[...evals].reverse().map(e => html`<tr key=${e.env + e.step + e.stage}><td><a href=${link(['run', run, 'rows'], { kind: 'eval', stage: e.stage, env: e.env, from: e.step, to: e.step })}>${envs.length > 1 ? e.env + ', ' : ''}step ${e.step}, ${STAGE[e.stage] || e.stage}</a></td><td>${interval(e['pass@1'])}</td>
    ${levels.map(l => html`<td class="cell" key=${l} style=${e.levels && e.levels[l] !== undefined ? { background: `hsl(${Math.round(10 + 130 * e.levels[l])} 60% 45% / .28)` } : {}}>${e.levels && e.levels[l] !== undefined ? number(e.levels[l], 2) : ''}</td>`)}
    <td class="num hide">${e.tasks}</td><td class="num hide">${Math.round(100 * (e.truncated || 0))} %</td><td class="num hide">${e.ungraded}</td></tr>`)}</tbody></table></div></div>`
}

function Curriculum({ run, overview, beat }) {
  const state = useData(['run', run, 'curriculum'], {}, beat)
  const beliefs = Object.entries(overview.curriculum)
  const bands = beliefs.filter(([, part]) => part.in_band)
  return html`${state.data && state.data.bins.length ? html`<div class="two"><div class="card"><h3>Where rollouts went <small>darker: more rollouts; red to green: their mean score</small></h3><${LevelMap} data=${state.data} />
      ${state.data.dropped.length ? html`<p class="soft">Dropped: ${state.data.dropped.map(([reason, count]) => html`<a key=${reason} href=${link(['run', run, 'rows'], { kept: 'dropped', reason })}>${reason || 'other'} ${count.toLocaleString('en')}</a> `)}</p>` : ''}</div>
    <div class="card"><h3>Believed against realised p</h3>${state.data.believed.length ? html`<${Reliability} rows=${state.data.believed} />` : html`<p class="soft">This curriculum predicts nothing, or the run was recorded before predictions were kept.</p>`}</div></div>` : html`<p class="soft">No rollout has reached the learner yet.</p>`}
  <div class="charts top">${bands.map(([env, part]) => html`<${Chart} key=${env} title=${`${env}: tasks by believed p`} x=${part.in_band.map(p => p[0])} range=${[0, 1]} series=${['in_band', 'solved', 'hopeless'].filter(n => part[n]).map(n => ({ label: n.replace('_', ' '), values: part[n].map(p => p[1]) }))} />`)}
  ${beliefs.filter(([, part]) => part.level_p).map(([env, part]) => { const levels = Math.max(...part.level_p.map(p => (p[1] || []).length)); return html`<${Chart} key=${env} title=${`${env}: believed p of each level`} x=${part.level_p.map(p => p[0])} range=${[0, 1]} series=${Array.from({ length: levels }, (_, n) => ({ label: `${n + 1}`, values: part.level_p.map(p => p[1] ? p[1][n] : null) }))} />` })}</div>`
}

function RunView({ run, beat, query }) {
  const state = useData(['run', run, 'overview'], { curves: query.curves }, beat)
  const [extra, setExtra] = useState('')
  if (!state.data) return html`<${Loading} state=${state} />`
  const o = state.data, marks = o.alarms_list.map(a => ({ x: a.step }))
  const curve = name => (o.meanings[name] || '')
  const shown = Object.keys(o.curves)
  const add = name => { setExtra(''); if (name) location.hash = link(['run', run], { curves: [...shown, name].join(',') }).slice(1) }
  const newest = o.heldout[0]
  return html`<div class="title"><h1>${o.id}</h1><${State} value=${o.state} />${o.alarms ? html`<a class="pill warn" href="#alarms" onClick=${e => { e.preventDefault(); document.getElementById('alarms').scrollIntoView() }}>${o.alarms} alarm${o.alarms > 1 ? 's' : ''}</a>` : ''}<small>${o.envs.join(', ')} · ${o.model} · ${o.algorithm} · began ${when(o.began)} UTC</small></div>
  <div class="tiles"><div class="tile"><span>step</span><b>${o.step}</b> <small>of ${o.steps}</small><div class="progress"><i style=${{ width: `${100 * Math.min(1, o.step / (o.steps || 1))}%` }}></i></div></div>
    <div class="tile"><span>training score</span><b>${number(o.score)}</b><small>of the last round</small></div>
    <div class="tile"><span>held-out pass@1</span><b>${newest ? number(newest['pass@1'].value) : '–'}</b><small>${newest ? `[${number(newest['pass@1'].low)}, ${number(newest['pass@1'].high)}] ${newest.env}, step ${newest.step}` : ''}</small></div>
    <div class="tile"><span>tokens/s</span><b>${number(last(o.curves['rollout/tokens_per_second'] || [], (o.x.length || 1) - 1), 0)}</b><small>sampled, over the whole step</small></div>
    <div class="tile"><span>time</span><b>${seconds(o.seconds)}</b><small>last written ${when(o.changed)}</small></div>
    <a class="tile" href=${link(['run', run, 'rows'])}><span>trajectories</span><b>browse →</b><small>filter, read, compare</small></a></div>
  <div id="alarms">${o.alarms_list.map(a => html`<div class="alarm" role="status" key=${a.name}><b>${a.name}</b><p>${pieces(String(a.text))}</p><a href=${link(['run', run, 'rows'], { kind: 'train', from: a.step, to: a.step })}>step ${a.step} →</a></div>`)}</div>
  <h2>Held-out success <small>${o.verdict}</small></h2><${HeldOut} evals=${o.evals} run=${run} />
  <h2>Curves <small>${marks.length ? 'dashed: an alarm' : ''}</small></h2>
  ${o.x.length ? html`<div class="charts">${shown.map(name => html`<${Chart} key=${name} title=${name} hint=${curve(name)} x=${o.x} marks=${marks} series=${[{ label: name, values: o.curves[name] }]} />`)}</div>
  ${EMBEDDED ? '' : html`<p><label>Another curve: <select value=${extra} onChange=${e => add(e.target.value)}><option value="">choose …</option>${o.names.filter(n => !shown.includes(n)).map(n => html`<option key=${n}>${n}</option>`)}</select></label></p>`}` : html`<p class="soft">No step is done yet${o.warm_start.length ? ': the warm start is over' : ''}.</p>`}
  <h2>Curriculum</h2><${Curriculum} run=${run} overview=${o} beat=${beat} />
  <h2>Time by stage</h2><div class="card"><${Bars} parts=${Object.entries(o.totals)} /></div>
  ${o.x.length ? html`<div class="charts top"><${Chart} title="seconds per step" wide=${true} x=${o.x} series=${[['rollout/round_seconds', 'rollouts'], ['learn/seconds', 'learning'], ['learn/publish_seconds', 'publishing'], ['seconds', 'whole step']].map(([name, label]) => ({ label, values: o.stages[name], dash: name === 'seconds' }))} /></div>` : ''}
  <h2>Recipe and machine</h2><details class="card"><summary>recipe.yaml</summary><${Text} value=${o.recipe} /></details><details class="card"><summary>environment.json</summary><${Text} value=${o.environment} /></details>`
}

const COLS = [['step', 'step', 'num'], ['task', 'task', ''], ['grp', 'group', 'num hide'], ['score', 'score', ''], ['kept', 'fate', ''], ['advantage', 'advantage', 'num hide'], ['predicted', 'believed p', 'num hide'], ['ending', 'ending', 'hide'], ['turns', 'turns', 'num'], ['tokens', 'tokens', 'num hide'], ['tool_errors', 'errors', 'num hide'], ['note', 'evidence', 'cut hide']]
// A field that keeps what is being typed while the page around it is drawn again.
function Typed({ name, cls, hint, value, done }) {
  const [typed, setTyped] = useState({ value, text: value })
  return html`<input name=${name} id=${name === 'text' ? 'text' : null} class=${cls} placeholder=${hint} value=${typed.value === value ? typed.text : value} inputmode=${cls === 'short' ? 'numeric' : 'search'} onInput=${e => setTyped({ value, text: e.target.value })} onChange=${e => done(e.target.value)} />`
}
function RowsView({ run, query, beat, go }) {
  const facets = useData(['run', run, 'facets'], {}, beat)
  const state = useData(['run', run, 'rows'], query, beat)
  const asked = JSON.stringify(query), [spot, setSpot] = useState({ asked, row: 0 }), at = spot.asked === asked ? spot.row : 0
  const [open, setOpen] = useState(innerWidth > 820 || Object.keys(query).length > 0)
  const data = state.data, unread = data && data.text_share !== null && data.text_share < 1
  useEffect(() => {
    if (!unread || EMBEDDED) return
    const timer = setTimeout(() => go.refresh(), 1000)
    return () => clearTimeout(timer)
  }, [data])
  const set = change => { location.hash = link(['run', run, 'rows'], { ...address().query, page: '', ...change }).slice(1) }
  const rows = data ? data.rows.map(r => Object.fromEntries(data.columns.map((c, n) => [c, r[n]]))) : []
  const page = +(query.page || 0), pages = data ? Math.max(1, Math.ceil(data.total / data.size)) : 1
  go.keys = {
    j: () => move(1), k: () => move(-1), Enter: () => rows[at] && (location.hash = link(['run', run, 'one', rows[at].key]).slice(1)),
    ']': () => page + 1 < pages && set({ page: page + 1 }), '[': () => page && set({ page: page - 1 || '' }), '/': () => document.getElementById('text').focus(),
  }
  const move = by => setSpot(old => ({ asked, row: Math.max(0, Math.min(rows.length - 1, (old.asked === asked ? old.row : 0) + by)) }))
  useEffect(() => { const row = document.getElementById('row' + at); if (row) row.scrollIntoView({ block: 'nearest' }) }, [spot])
  const f = facets.data || {}
  const pick = (name, label, values) => html`<label>${label}<select name=${name} value=${query[name] || ''} onChange=${e => set({ [name]: e.target.value })}><option value="">all</option>${(values || []).map(v => html`<option key=${v[0]} value=${v[0]}>${v[0]}${v[1] === undefined ? '' : ` (${v[1].toLocaleString('en')})`}</option>`)}</select></label>`
  const type = (name, label, cls, hint) => html`<label>${label}<${Typed} name=${name} cls=${cls} hint=${hint || ''} value=${query[name] || ''} done=${value => set({ [name]: value })} /></label>`
  const sort = query.sort || ''
  return html`<div class="title"><h1>Trajectories</h1><small>${data ? `${data.total.toLocaleString('en')} match` : ''}${data && data.graded ? `, ${number(100 * data.passed / data.graded, 1)} % of the graded score 1` : ''}${data && data.behind ? ' · still reading' : ''}${unread ? ` · reading texts: ${Math.round(100 * data.text_share)} %` : ''}</small><span class="right">${Object.values(query).some(Boolean) ? html`<a href=${link(['run', run, 'rows'])}>clear all filters</a>` : ''}</span></div>
  ${EMBEDDED ? html`<p class="soft">A sample of the run; <code>agentrl view</code> shows all of it.</p>` : html`<form class="filters" role="search" onSubmit=${e => e.preventDefault()}>${type('text', 'words in the transcript', 'long', 'press / to search')}<details class="more" open=${open} onToggle=${e => setOpen(e.target.open)}><summary>filters</summary><div class="filters">${type('task', 'task contains', '')}${pick('kind', 'train or eval', f.kind)}${pick('env', 'environment', f.env)}${pick('level', 'level', f.level)}${pick('score', 'score', [['pass'], ['partial'], ['fail'], ['ungraded']])}${pick('kept', 'fate', [['kept'], ['dropped'], ['undecided']])}${pick('reason', 'why dropped', f.reason)}${pick('ending', 'ending', f.ending)}${pick('tool', 'tool', f.tool)}${pick('stage', 'evaluation', f.stage)}${type('from', 'step from', 'short', f.steps ? String(f.steps[0] ?? '') : '')}${type('to', 'to', 'short', f.steps ? String(f.steps[1] ?? '') : '')}</div></details></form>`}
  ${!data ? html`<${Loading} state=${state} />` : html`<div class="card scroll"><table class="rows" aria-busy=${state.old || unread ? 'true' : 'false'}><thead><tr>${COLS.map(([name, label, cls]) => html`<th key=${name} class=${cls} aria-sort=${sort.replace('-', '') === name ? (sort[0] === '-' ? 'descending' : 'ascending') : null}>${name === 'note' ? label : html`<button onClick=${() => set({ sort: sort === '-' + name ? name : '-' + name })}>${label}${sort.replace('-', '') === name ? (sort[0] === '-' ? ' ↓' : ' ↑') : ''}</button>`}</th>`)}</tr></thead><tbody>
  ${rows.map((r, n) => html`<tr key=${r.key} id=${'row' + n} class=${n === at ? 'current' : ''}><td class="num">${r.step ?? '–'}</td><td class="cut"><a href=${link(['run', run, 'one', r.key])}>${pieces(r.task)}</a></td><td class="num hide">${r.kind === 'train' ? html`<a href=${link(['run', run, 'group', r.key])}>${r.grp}.${r.idx}</a>` : ''}</td><td><${Score} value=${r.score} />${r.alarm ? html` <span class="pill warn">alarm</span>` : ''}</td><td><${Fate} row=${r} /></td><td class="num hide">${number(r.advantage, 2)}</td><td class="num hide">${number(r.predicted, 2)}</td><td class="hide">${r.ending}</td><td class="num">${r.turns}</td><td class="num hide">${r.tokens}</td><td class="num hide">${r.tool_errors || ''}</td><td class="cut hide">${pieces(String(r.note || ''))}</td></tr>`)}
  </tbody></table>${rows.length ? '' : html`<p class="empty">Nothing matches these filters.</p>`}</div>
  <div class="pager"><button disabled=${!page} onClick=${() => set({ page: page - 1 || '' })}>← newer</button><span>page ${page + 1} of ${pages}</span><button disabled=${page + 1 >= pages} onClick=${() => set({ page: page + 1 })}>older →</button></div>`}`
}

const LABEL = { system: 'system', user: 'task', assistant: 'policy', tool: 'tool' }
const json = text => { try { const value = JSON.parse(text); return value && typeof value === 'object' && Object.keys(value).length ? Object.entries(value).map(([k, v]) => `${k}: ${typeof v === 'string' ? v : JSON.stringify(v)}`).join('\n') : '' } catch { return text } }
const Turn = ({ m, n, first }) => html`<article class=${`turn ${m.role} ${m.role === 'tool' && m.content.startsWith('error:') ? 'failed' : ''}`}><header><b>${LABEL[m.role] || m.role}</b>${m.name ? html`<span>${pieces(m.name)}</span>` : ''}<span class="soft">${n}</span></header>
  ${m.thinking ? html`<div class="thinking"><${Text} value=${m.thinking} first=${first} /></div>` : ''}${m.content ? html`<${Text} value=${m.content} first=${first} />` : ''}
  ${m.tool_calls.map((c, i) => html`<div class="call" key=${i}><b>${pieces(c.name || '(unreadable call)')}</b>${c.error ? html` <span class="pill bad">${pieces(c.error)}</span>` : ''}<${Text} value=${json(c.arguments)} first=${first} /></div>`)}
  ${!m.content && !m.thinking && !m.tool_calls.length ? html`<span class="soft">(nothing)</span>` : ''}
  ${m.cut && m.cut.content ? html`<small>cut: ${m.cut.content.toLocaleString('en')} characters in all; <a href=${'?full#'} onClick=${e => { e.preventDefault(); const [p, q] = location.hash.split('?'); location.hash = p + '?' + new URLSearchParams([...new URLSearchParams(q || ''), ['full', '1']]) }}>load all</a></small>` : ''}</article>`

const SOURCE = ['template', 'observation', 'sampled', 'forced']
const surprise = p => p > -0.1 ? '' : p > -0.7 ? 'p1' : p > -2.3 ? 'p2' : p > -4.6 ? 'p3' : 'p4'
function Tokens({ segments, advantage, go }) {
  const [at, setAt] = useState([0, 0])
  const [size, setSize] = useState(3000)
  const place = e => { const t = e.target.dataset; if (t && t.at) setAt(t.at.split('.').map(Number)) }
  const s = segments[at[0]]
  const step = by => setAt(old => { const [n, token] = old, next = token + by; if (!segments[n]) return old; if (next >= 0 && next < segments[n].ids.length) return [n, next]; return segments[n + by] ? [n + by, by > 0 ? 0 : segments[n + by].ids.length - 1] : old })
  go.tokens = { ArrowRight: () => step(1), ArrowLeft: () => step(-1) }
  const body = useMemo(() => segments.map((part, n) => html`<div class="tokens" tabindex="0" key=${n} aria-label="tokens; arrow keys move">${part.ids.slice(0, size).map((id, i) => {
    const text = part.texts ? part.texts[i] : `${id} `
    const shown = text.replace(/\n/g, '↵\n')
    return html`<span key=${i} data-at=${`${n}.${i}`} class=${`s${part.sources[i]} ${part.sources[i] === 2 ? surprise(part.logprobs[i]) : ''}`}>${CONTROL.test(shown) ? shown.replace(CONTROLS, c => `⟨${mark(c)}⟩`) : shown || '·'}</span>`
  })}${part.ids.length > size ? html`<button onClick=${() => setSize(size + 10000)}>show more (${part.count.toLocaleString('en')} tokens)</button>` : part.count > part.ids.length ? html`<p class="soft">${part.count.toLocaleString('en')} tokens in all; the rest is not shown</p>` : ''}</div>`), [segments, size])
  const box = useRef(null)
  useEffect(() => { if (!box.current) return; box.current.querySelectorAll('.sel').forEach(x => x.classList.remove('sel')); const x = box.current.querySelector(`[data-at="${at.join('.')}"]`); if (x) x.classList.add('sel') }, [at, body])
  return html`<ul class="legend"><li><i style=${{ background: 'var(--sampled)' }}></i>sampled by the policy: in the loss</li><li><i style=${{ background: 'var(--observation)' }}></i>observation: masked</li><li><i style=${{ background: 'var(--template)' }}></i>template: masked</li><li>darker, then red: less likely</li></ul>
  <div ref=${box} onMouseOver=${place} onClick=${place}>${body}</div>
  ${s && s.ids.length ? html`<div class="status" role="status"><span>token <b>${at[1]}</b>${segments.length > 1 ? ` of segment ${at[0]}` : ''}</span><span>id <b>${s.ids[at[1]]}</b></span><span>${SOURCE[s.sources[at[1]]]}</span>${s.sources[at[1]] === 2 ? html`<span>logprob <b>${number(s.logprobs[at[1]], 4)}</b></span><span>p <b>${number(Math.exp(s.logprobs[at[1]]), 4)}</b></span><span>policy version <b>${s.versions[at[1]]}</b></span><span>${advantage === null || advantage === undefined ? 'not trained on' : html`advantage <b>${number(advantage)}</b>`}</span>` : html`<span>not in the loss</span>`}</div>` : ''}`
}

const Squares = ({ run, rows, current, to = 'one' }) => html`<div class="squares">${rows.map(r => html`<a key=${r.key} class=${shade(r.score)} aria-current=${r.key === current ? 'true' : null} href=${link(['run', run, to, r.key])} title=${`rollout ${r.idx}: ${r.ending}`}>${r.score === null ? '?' : number(r.score, 2)}</a>`)}</div>`
function Verdict({ verdict, outcome }) {
  return html`<section class="card"><h3>Verdict</h3>${verdict ? html`<p><${Score} value=${verdict.score} /> <small>${verdict.trust}, ${pieces(String(verdict.verifier))}</small></p><ul class="plain">${(verdict.evidence || []).map((e, n) => html`<li key=${n}>${pieces(String(e))}</li>`)}</ul>
    ${Object.keys(verdict.breakdown || {}).length ? html`<dl>${Object.entries(verdict.breakdown).map(([k, v]) => html`<dt key=${k}>${pieces(k)}</dt><dd>${number(v)}</dd>`)}</dl>` : ''}${(verdict.turn_scores || []).length ? html`<p class="soft">by turn: ${verdict.turn_scores.map(v => number(v)).join(', ')}</p>` : ''}` : html`<p class="soft">There is none.</p>`}
    ${outcome.fault ? html`<p class="error">${pieces(`${outcome.fault.stage || ''} ${outcome.fault.cause || ''} ${outcome.fault.line || ''}`)}</p>` : ''}${outcome.alarm ? html`<p class="pill warn">broke grading or its episode twice: scored 0</p>` : ''}</section>`
}
const plain = v => Array.isArray(v) ? v.map(x => typeof x === 'string' ? x : JSON.stringify(x)).join('\n') : v !== null && typeof v === 'object' ? JSON.stringify(v, null, 1) : String(v)
function Ledger({ ledger }) {
  const lists = Object.entries(ledger).filter(([, v]) => v !== null && typeof v === 'object' && Object.keys(v).length), rest = Object.entries(ledger).filter(([, v]) => v === null || typeof v !== 'object')
  return html`<section class="card"><h3>Side effects</h3>${rest.length || lists.length ? '' : html`<p class="soft">None were recorded.</p>`}${lists.map(([k, v]) => html`<div key=${k}><small>${pieces(k)}</small><${Text} value=${plain(v)} first=${2000} /></div>`)}<dl>${rest.map(([k, v]) => html`<dt key=${k}>${pieces(k.replaceAll('_', ' '))}</dt><dd>${typeof v === 'number' ? number(v) : pieces(String(v))}</dd>`)}</dl></section>`
}

const BEGINS = { task: 'Conversation', summary: 'After a summary', drop: 'After old results were left out', subagent: 'Sub-agent' }
function Conversations({ parts, name }) {
  const turns = (part, from, to) => part.messages.slice(from, to).map((m, n) => html`<${Turn} key=${name + (from + n)} m=${m} n=${from + n} />`)
  return parts.map((part, i) => html`<section key=${name + i}><h3>${BEGINS[part.kind] || pieces(part.kind)} <small>${i + 1} of ${parts.length}</small></h3>${i ? html`<details><summary>begins with ${part.opening} messages</summary>${turns(part, 0, part.opening)}</details>` : turns(part, 0, part.opening)}${turns(part, part.opening)}</section>`)
}

function OneView({ run, trajectory, query, go }) {
  const state = useData(['run', run, 'one', trajectory], { full: query.full })
  const [tokens, setTokens] = [query.tokens === '1', on => { location.hash = link(['run', run, 'one', trajectory], { ...query, tokens: on ? '1' : '' }).slice(1) }]
  const t = state.data
  if (!t || state.old && state.error) return html`<${Loading} state=${state} />`
  const c = t.columns, rows = t.group, here = rows.findIndex(r => r.key === trajectory)
  const sibling = by => { const r = rows[here + by]; if (r) location.hash = link(['run', run, 'one', r.key], query).slice(1) }
  go.keys = { t: () => setTokens(!tokens), g: () => { location.hash = link(['run', run, 'group', trajectory]).slice(1) }, j: () => sibling(1), k: () => sibling(-1), ...(tokens ? { ArrowRight: () => go.tokens.ArrowRight(), ArrowLeft: () => go.tokens.ArrowLeft() } : { ArrowRight: () => sibling(1), ArrowLeft: () => sibling(-1) }) }
  return html`<div class="title"><h1>${pieces(t.task.id)}</h1><${Score} value=${c.score} /><${Fate} row=${c} /><span class=${`pill ${c.ending === 'done' ? '' : 'warn'}`}>${c.ending}</span>${c.grade !== 'graded' ? html`<span class="pill bad">${c.grade}</span>` : ''}
    <span class="right"><button aria-pressed=${!tokens} onClick=${() => setTokens(false)}>Turns</button> <button aria-pressed=${tokens} onClick=${() => setTokens(true)}>Tokens</button></span></div>
  <div class="split"><div>${tokens ? html`<${Tokens} segments=${t.segments} advantage=${c.advantage} go=${go} />` : (t.conversations || []).length > 1 ? html`<${Conversations} parts=${t.conversations} name=${trajectory + (query.full || '')} />` : t.messages.map((m, n) => html`<${Turn} key=${trajectory + n + (query.full || '')} m=${m} n=${n} />`)}</div>
  <aside class="side"><section class="card"><h3>${c.kind === 'train' ? `Group ${c.grp}` : 'Tries of this task'} <a href=${link(['run', run, 'group', trajectory])}>side by side</a></h3><${Squares} run=${run} rows=${rows} current=${trajectory} /></section>
    <${Verdict} verdict=${t.verdict} outcome=${t.outcome} />
    ${t.audit ? html`<section class="card"><h3>Audit verifier</h3><p><${Score} value=${t.audit.score} /> <small>no part of the reward</small></p><ul class="plain">${(t.audit.evidence || []).map((e, n) => html`<li key=${n}>${pieces(String(e))}</li>`)}</ul></section>` : ''}
    <section class="card"><h3>What became of it</h3><dl><dt>step</dt><dd>${c.step ?? '–'}</dd><dt>advantage</dt><dd>${number(c.advantage)}</dd><dt>believed p</dt><dd>${number(c.predicted)}</dd><dt>policy version</dt><dd>${c.oldest === c.version ? c.version : `${c.oldest} to ${c.version}`}</dd><dt>turns</dt><dd>${c.turns}</dd><dt>sampled tokens</dt><dd>${c.tokens}</dd><dt>stored</dt><dd>${when(c.time)}</dd>${Object.entries(t.timings || {}).map(([k, v]) => html`<dt key=${k}>${k} time</dt><dd>${seconds(v)}</dd>`)}</dl></section>
    <${Ledger} ledger=${t.ledger || {}} />
    <section class="card"><h3>Task</h3><dl><dt>environment</dt><dd>${t.env}</dd><dt>split</dt><dd>${t.task.split}</dd><dt>level</dt><dd>${t.task.level}</dd><dt>tags</dt><dd>${pieces((t.task.tags || []).join(', '))}</dd><dt>seed</dt><dd>${String(t.seed)}</dd></dl><p><a href=${link(['compare', run, run], { task: t.task.id })}>every try of this task</a></p><details><summary>setup</summary><${Text} value=${typeof t.task.setup === 'string' ? t.task.setup : JSON.stringify(t.task.setup, null, 1)} first=${4000} /></details></section></aside></div>`
}

function Column({ run, trajectory, title }) {
  const state = useData(['run', run, 'one', trajectory])
  if (!state.data) return html`<section><${Loading} state=${state} /></section>`
  const t = state.data, c = t.columns
  return html`<section><div class="title"><a href=${link(['run', run, 'one', trajectory])}><b>${title}</b></a><${Score} value=${c.score} /><span class="pill">${c.ending}</span>${c.advantage !== null && c.advantage !== undefined ? html`<small>advantage ${number(c.advantage, 2)}</small>` : ''}</div>
  ${t.messages.filter(m => m.role !== 'system').map((m, n) => html`<${Turn} key=${n} m=${m} n=${n} first=${3000} />`)}<${Verdict} verdict=${t.verdict} outcome=${t.outcome} /></section>`
}

function GroupView({ run, trajectory, go }) {
  const state = useData(['run', run, 'one', trajectory])
  if (!state.data) return html`<${Loading} state=${state} />`
  const t = state.data, rows = t.group
  go.keys = { g: () => { location.hash = link(['run', run, 'one', trajectory]).slice(1) } }
  return html`<div class="title"><h1>${t.columns.kind === 'train' ? `Group ${t.columns.grp}` : `Tries`}: ${pieces(t.task.id)}</h1><${Fate} row=${t.columns} /><small>believed p ${number(t.columns.predicted)}, realised ${number(rows.reduce((sum, r) => sum + (r.score || 0), 0) / Math.max(1, rows.length))}</small></div>
  <${Squares} run=${run} rows=${rows} current=${trajectory} /><div class="columns top">${rows.slice(0, 16).map(r => html`<${Column} key=${r.key} run=${run} trajectory=${r.key} title=${`rollout ${r.idx}`} />`)}</div>`
}

function Side({ run, rows, chosen, choose, n }) {
  if (!rows.length) return html`<section class="card"><p class="soft">${run} has no trajectory of this task.</p></section>`
  const pick = rows.some(r => r.key === chosen) ? chosen : rows[n ? rows.length - 1 : 0].key
  return html`<section><label class="soft">${run} <select value=${pick} onChange=${e => choose(e.target.value)}>${rows.map(r => html`<option key=${r.key} value=${r.key}>${r.kind === 'eval' ? `eval ${r.stage}` : 'train'}, step ${r.step ?? '–'}, ${r.grp}.${r.idx}: ${r.score === null ? 'no score' : number(r.score)}</option>`)}</select></label><${Column} run=${run} trajectory=${pick} title=${run} /></section>`
}
function TaskSides({ a, b, query, set }) {
  const first = useData(['run', a, 'task'], { task: query.task }), second = useData(['run', b, 'task'], { task: query.task })
  if (!first.data || !second.data) return html`<${Loading} state=${first.error ? first : second} />`
  return html`<div class="sides"><${Side} n=${0} run=${a} rows=${first.data} chosen=${query.left} choose=${v => set({ left: v })} /><${Side} n=${1} run=${b} rows=${second.data} chosen=${query.right} choose=${v => set({ right: v })} /></div>`
}
function CompareView({ a, b, query, beat }) {
  const first = useData(['run', a, 'overview'], {}, beat), second = useData(['run', b, 'overview'], {}, beat)
  const shared = useData(['run', a, 'shared', b], {}, beat)
  const set = change => { location.hash = link(['compare', a, b], { ...query, ...change }).slice(1) }
  if (query.task) return html`<div class="title"><h1>${pieces(query.task)}</h1><a href=${link(['compare', a, b])}>← ${a === b ? 'tasks of' : 'both runs'} ${a === b ? a : ''}</a></div><${TaskSides} a=${a} b=${b} query=${query} set=${set} />`
  if (!first.data || !second.data) return html`<${Loading} state=${first.error ? first : second} />`
  const names = Object.keys(first.data.curves).filter(n => second.data.curves[n])
  const x = [...new Set([...first.data.x, ...second.data.x])].sort((p, q) => p - q)
  const on = o => n => { const at = new Map(o.x.map((s, i) => [s, o.curves[n][i]])); return x.map(s => at.get(s) ?? null) }
  const envs = [...new Set([...first.data.evals, ...second.data.evals].map(e => e.env))]
  const ends = (o, env) => { const rows = evalSeries(o.evals, env); return rows[rows.length - 1] }
  return html`<div class="title"><h1>${a} <span class="soft">against</span> ${b}</h1></div>
  <div class="card scroll"><table><thead><tr><th>held-out pass@1, last</th><th>${a}</th><th>${b}</th><th class="num">difference</th></tr></thead><tbody>${envs.map(env => { const p = ends(first.data, env), q = ends(second.data, env); return html`<tr key=${env}><td>${env}</td><td>${p ? interval(p['pass@1']) : '–'}</td><td>${q ? interval(q['pass@1']) : '–'}</td><td class="num">${p && q ? number(q['pass@1'].value - p['pass@1'].value) : '–'}</td></tr>` })}</tbody></table>${(shared.data || {}).verdict ? html`<p><b>${shared.data.verdict}</b></p>` : ''}</div>
  ${a === b ? '' : html`<h2>Curves</h2><div class="charts">${names.map(n => html`<${Chart} key=${n} title=${n} x=${x} series=${[{ label: a, values: on(first.data)(n) }, { label: b, values: on(second.data)(n), color: '--c2' }]} />`)}</div>`}
  <h2>The same tasks <small>largest difference first</small></h2>${!shared.data ? html`<${Loading} state=${shared} />` : html`<div class="card scroll"><table><thead><tr><th>task</th><th class="hide">environment</th><th class="num">level</th><th>from</th><th class="num">${a}</th><th class="num">${b}</th></tr></thead><tbody>${shared.data.tasks.slice(0, 200).map(r => html`<tr key=${r.task + r.kind}><td class="cut"><a href=${link(['compare', a, b], { task: r.task })}>${pieces(r.task)}</a></td><td class="hide">${r.env}</td><td class="num">${r.level}</td><td>${r.kind}</td><td class="num">${number(r.rates[0], 2)} <small>of ${r.tries[0]}</small></td><td class="num">${number(r.rates[1], 2)} <small>of ${r.tries[1]}</small></td></tr>`)}</tbody></table>${shared.data.tasks.length ? '' : html`<p class="empty">They have no task in common.</p>`}</div>`}`
}

function RedTeamView() {
  const state = useData(['redteam'])
  if (!state.data) return html`<${Loading} state=${state} />`
  const rows = Array.isArray(state.data.rows) ? state.data.rows : []
  const envs = [...new Set(rows.map(r => r.env))], columns = [...new Set(rows.map(r => `${r.backend}, level ${r.level}`))].sort()
  const at = new Map(rows.map(r => [`${r.env}\u0000${r.backend}, level ${r.level}`, r]))
  const tried = rows.reduce((sum, r) => sum + (r.tried || 0), 0), won = rows.reduce((sum, r) => sum + Object.keys(r.succeeded || {}).length, 0)
  return html`<div class="title"><h1>Red team</h1><span class=${`pill ${won ? 'bad' : 'good'}`}>${won} of ${tried.toLocaleString('en')} attacks succeeded</span></div>
  <div class="card scroll heat"><table><thead><tr><th>environment</th>${columns.map(c => html`<th key=${c}>${c}</th>`)}</tr></thead><tbody>${envs.map(env => html`<tr key=${env}><th>${env}</th>${columns.map(c => { const r = at.get(`${env}\u0000${c}`), lost = r ? Object.keys(r.succeeded || {}) : []; return html`<td key=${c} class="cell" title=${r ? lost.join(', ') || `${r.tried} attacks tried, none succeeded` : ''}>${r ? html`<span class=${`pill ${lost.length || !r.ok ? 'bad' : 'good'}`}>${lost.length} / ${r.tried}</span>` : ''}</td>` })}</tr>`)}</tbody></table>${rows.length ? '' : html`<p class="empty">This file holds no matrix; make one with <code>python -m benchmarks.matrix</code>.</p>`}</div>`
}
