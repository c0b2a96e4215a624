// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/tokenizer/chat"
	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// Mode says how the ids of a prompt were made.
type Mode string

// The modes.
const (
	// Exact: all ids are the engine's.
	Exact Mode = "exact"
	// ExactPrefix: the first ids are the engine's; [Prompt.Exact] counts them.
	ExactPrefix Mode = "exact_prefix"
	// Bytes: text-block mode. Each id stands for four bytes of a canonical text. Equal prompts have equal
	// ids, but no engine knows these ids.
	Bytes Mode = "bytes"
	// None: there are no ids, only an estimate of the prompt's length.
	None Mode = "none"
)

// Reasons why ids are not exact.
const (
	NoTokenizer   = "no_tokenizer"   // no files for this model
	NoRenderer    = "no_renderer"    // no chat template
	TemplateError = "template_error" // the template, or the engine, refuses the request
	Unsupported   = "unsupported"    // the template reaches a feature, or a limit, of kvroute's renderer
	BadText       = "bad_text"       // JSON or text that the engine cannot read
	TooLarge      = "too_large"      // more than MaxPrompt, as it is or rewritten
	Budget        = "budget"         // the time was up
	Items         = "items"          // an image or the like
	Drifted       = "drift"          // the engine was seen to count otherwise
)

const (
	// bytesPerToken estimates the number of tokens where only a size is known. English text has about four
	// bytes a token.
	bytesPerToken = 4
	// itemTokens is the estimate for an image or the like. Engines make between 64 and some thousand
	// tokens of one. Only the load counts it.
	itemTokens = 256
)

// MaxPrompt is the largest text in bytes that is encoded exactly. After normalization the text may
// have four times its size, or 4 MiB if that is more.
const MaxPrompt = 8 << 20

// Model makes prompts for one model: it has the chat template, the tokenizer and a cache of prefixes.
// A nil Model supports text-block mode only. Any number of goroutines may use one Model.
type Model struct {
	tok   *Tokenizer
	chat  *chat.Renderer
	cache *Cache
	why   string // there is no renderer, or it cannot render some chats
	usual string // the reason why chats without tools have no exact ids; "" if they have

	profile     chat.Profile
	flags       chat.Flags
	ownTemplate bool   // ModelConfig.ChatTemplate replaces that of the files
	context     int    // max_position_embeddings of config.json, 0 if unknown
	bos         uint32 // the id of bos_token, if there is one
	hasBOS      bool

	reached     atomic.Pointer[string]      // the first unsupported feature that a request reached
	unconfirmed classSet                    // [Model.SetConfirmed]
	asked       [chat.Classes]atomic.Uint32 // prompts of an unconfirmed class
}

// ModelConfig holds the settings that the model's files do not contain.
type ModelConfig struct {
	Config
	Profile chat.Profile // of the engine. Default vllm
	// ChatTemplate replaces the files' own template.
	ChatTemplate string
	// Flags are the engine's.
	Flags chat.Flags
	// Cache is shared by models; nil encodes every prompt from scratch.
	Cache *Cache
}

// LoadModel reads the files of a model: the vocabulary, which must be done
// exactly, and a chat template. Without a template that can be read, chats are in
// text-block mode. LoadModel renders three short chats, and [Model.Degraded] says which chats cannot be exact. The
// error names the file.
func LoadModel(fsys fs.FS, c ModelConfig) (*Model, error) {
	if c.Loader == "" && engine.Of(string(c.Profile)).Transformers4 {
		c.Loader = Transformers4
	}
	c.Profile = cmp.Or(c.Profile, chat.VLLM)
	files, err := chat.LoadFiles(func(name string) ([]byte, error) { return ReadFile(fsys, name) }, func(folder string) (names []string) {
		entries, _ := fs.ReadDir(fsys, folder) // it may be missing
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	})
	if err != nil {
		return nil, err
	}
	if c.ChatTemplate != "" {
		files.SetTemplate(chat.TemplateOfFile(c.Profile, c.ChatTemplate))
	}
	files.Mode = c.Mode
	c.unchanged = files.UsesTokenizerJSON(c.Profile)
	tok, err := Load(fsys, c.Config)
	if err != nil {
		return nil, err
	}
	files.ID, files.Mistral, files.SortTools = tok.ID, tok.mistral, tok.tools == toolsSorted
	m := &Model{tok: tok, cache: c.Cache, profile: c.Profile, flags: c.Flags, ownTemplate: c.ChatTemplate != "", context: files.Context}
	m.bos, m.hasBOS = tok.ID(files.Special["bos_token"])
	if m.chat, err = chat.NewRenderer(c.Profile, files, c.Flags); err != nil {
		template, unreadable := errors.AsType[*jinja.Error](err)
		switch {
		case unreadable:
			m.why = describe(template)
		case errors.Is(err, chat.ErrNoTemplate):
			m.why = err.Error()
		default:
			return nil, err
		}
		return m, nil
	}
	if t := m.chat.Try(); t != nil {
		m.why = t.Chats + " have no exact ids: " + describe(t.Err)
		switch {
		case t.Chats != chat.AllChats:
		case t.Err.Lacking():
			m.usual = Unsupported
		default:
			m.usual = NoRenderer
		}
	}
	return m, nil
}

// describe says where in a template something cannot be done.
func describe(e *jinja.Error) string {
	return fmt.Sprintf("%s cannot be used: line %d: %.200s", e.Name, e.Line, e.Message)
}

// Tokenizer returns the model's tokenizer.
func (m *Model) Tokenizer() *Tokenizer { return m.tok }

// Degraded describes why some prompts of the model cannot be exact, or are slow to encode. It is empty
// if there is no such reason.
func (m *Model) Degraded() string {
	switch {
	case m == nil:
		return "no tokenizer"
	case m.unconfirmed.has(chat.PlainChat):
		return "the engine counts otherwise"
	case m.why != "":
		return m.why
	case m.reached.Load() != nil:
		return *m.reached.Load()
	case m.tok.Doubt != "":
		return m.tok.Doubt
	}
	return m.tok.Slow
}

// Usual returns the mode in which chats are normally encoded, and the reason if that mode is not
// [Exact].
func (m *Model) Usual() (mode Mode, reason string) {
	switch {
	case m == nil:
		return Bytes, NoTokenizer
	case m.unconfirmed.has(chat.PlainChat):
		return Bytes, Drifted
	case m.chat == nil:
		return Bytes, NoRenderer
	case m.usual != "":
		return Bytes, m.usual
	}
	return Exact, ""
}

// AsksAlike reports whether a worker's /tokenize renders the prompt of q as a completion request does.
// vLLM's /tokenize does not for chats of gpt-oss: earlier versions render the template. SGLang 0.5.23's does not for
// two fields: it reads add_generation_prompt, which chats ignore, and writes tools with defer_loading in another order.
func (m *Model) AsksAlike(q chat.Request) bool {
	switch {
	case m == nil || m.chat == nil || q.Prompt != nil:
		return true
	case m.profile == chat.SGLang:
		return q.AddGenerationPrompt == nil && !bytes.Contains(q.Tools, []byte("defer_loading"))
	}
	return !m.chat.Harmony()
}

// Prompt is an encoded prompt.
type Prompt struct {
	IDs    []uint32
	Exact  int // how many of them, from the first, are the engine's
	Mode   Mode
	Reason string // why not Exact
	Size   int    // bytes of text that were encoded
	Reused int    // of them those whose ids were known
	// Others is the number of tokens that the engine computes in addition: for the other prompts of a
	// list, for items, or for a request without a prompt. It is mostly an estimate.
	Others int
	// Class is the class of a request whose text was encoded; 0 for the others.
	Class chat.Class
	// Checked are the ids of a prompt in text-block mode whose class is unconfirmed, for a comparison with the
	// engine's; nil for most prompts. The caller may keep them.
	Checked []uint32
}

// Encode appends the ids of a request's prompt to dst. If the request has several prompts, which run
// as several sequences, Encode takes the longest and counts the others. now is the time that the chat
// template sees.
//
// A prompt that cannot be exact is encoded in text-block mode, with the reason. If ctx ends, the
// result has the ids up to that point. The error reports a prompt that is not text, and names the
// field.
func (m *Model) Encode(ctx context.Context, dst []uint32, q chat.Request, now time.Time) (Prompt, error) {
	return m.encode(ctx, dst, q, now, true)
}

// encode is Encode. judged says that unconfirmed classes count.
func (m *Model) encode(ctx context.Context, dst []uint32, q chat.Request, now time.Time, judged bool) (Prompt, error) {
	if m != nil && m.profile == chat.SGLang {
		q = m.readBySGLang(q)
	}
	switch {
	case q.Size > 0:
		return Prompt{IDs: dst, Mode: None, Reason: q.Inexact, Others: tokensOf(q.Size)}, nil
	case isTokenIDs(q.Prompt):
		return m.givenIDs(dst, q)
	case q.Inexact != "":
		return inBytes(dst, q, q.Inexact)
	case m == nil:
		return inBytes(dst, q, NoTokenizer)
	case q.Prompt == nil && (m.chat == nil || m.tok.tools == toolsUnknown && hasTools(q.Tools)):
		return inBytes(dst, q, NoRenderer)
	}
	room := texts.Get().(*[]byte)
	text, f, why := m.text(*room, q, now)
	var err error
	defer func() {
		if *room = text.Text; cap(*room) <= mostRoom {
			texts.Put(room)
		}
	}()
	if why != "" {
		return inBytes(dst, q, why)
	}
	if judged && m.unconfirmed.has(text.Class) {
		return m.inText(ctx, dst, q, now, text.Class)
	}
	if len(text.Text) > MaxPrompt {
		return inBytes(dst, q, TooLarge)
	}
	if q.Prompt != nil || !m.chat.Harmony() { // vLLM does not cut chats of gpt-oss
		if text.Cut, err = q.Cut(m.profile); err != nil {
			return inBytes(dst, q, TemplateError)
		}
	}
	p := Prompt{Mode: Exact, Class: text.Class, Size: text.Exact, Others: text.Items*itemTokens + tokensOf(text.Others)}
	if p.IDs, p.Reused, err = m.cache.append(ctx, dst, m.tok, text.Text[:text.Exact], f); err != nil {
		if errors.Is(err, errGrown) {
			return inBytes(dst, q, TooLarge)
		}
		p.Mode, p.Reason, p.Exact = ExactPrefix, Budget, len(p.IDs)-len(dst)
		return p, nil
	}
	if text.Continued != "" && text.Exact == len(text.Text) {
		if p, err = m.continued(ctx, p, text.Continued); err != nil {
			p.Mode, p.Reason, p.Exact = ExactPrefix, Budget, len(p.IDs)-len(dst)
			return p, nil
		}
	}
	p.Exact = len(p.IDs) - len(dst)
	if text.Cut.Kept == chat.ToContext && m.context > 0 && p.Exact >= m.context {
		return inBytes(dst, q, TooLarge) // the engine cuts it to its context length, which may be another one
	}
	switch {
	case text.Exact < len(text.Text):
		p.Mode, p.Reason, p.Exact = ExactPrefix, Items, max(0, p.Exact-itemMerges)
		p.IDs = AppendBytes(p.IDs, text.Text[text.Exact:])
	case text.Cut.Kept > 0:
		frame := [2]int{}
		if f == framed && text.Cut.Framed {
			frame = [2]int{len(m.tok.before), len(m.tok.after)}
		}
		p.IDs = append(p.IDs[:len(dst)], cutTo(p.IDs[len(dst):], text.Cut, frame)...)
		p.Exact = len(p.IDs) - len(dst)
	}
	return p, nil
}

// texts has memory for texts, of at most mostRoom bytes each.
//
//nolint:gochecknoglobals // a pool
var texts = sync.Pool{New: func() any { return new([]byte) }}

const mostRoom = 1 << 20

// hasTools reports whether a request's tools are more than an empty list.
func hasTools(tools []byte) bool {
	inside, isList := bytes.CutPrefix(bytes.TrimSpace(tools), []byte{'['})
	return isList && string(bytes.TrimSpace(inside)) != "]"
}

// text returns the prompt's text, which may be in the memory of room, or why there is none.
func (m *Model) text(room []byte, q chat.Request, now time.Time) (text chat.Text, f form, why string) {
	if q.Prompt != nil {
		text, err := chat.Completion(q)
		if err != nil {
			why = BadText
		}
		return text, formOf(string(q.AddSpecialTokens) != "false"), why
	}
	text, err := m.chat.Render(room, q, now)
	e, template := errors.AsType[*jinja.Error](err)
	switch {
	case text.Marked:
		return text, marked, ""
	case errors.Is(err, chat.ErrNoTemplate):
		why = NoRenderer
	case template && e.Lacking():
		why = Unsupported
		if m.reached.Load() == nil {
			reached := "some chats have no exact ids: " + describe(e)
			m.reached.CompareAndSwap(nil, &reached)
		}
	case template, errors.Is(err, chat.ErrRefused):
		why = TemplateError
	case err != nil:
		why = BadText
	}
	return text, formOf(text.Special || string(q.AddSpecialTokens) == "true"), why
}

// tokensOf estimates the number of tokens of size bytes.
func tokensOf(size int) int { return (size + bytesPerToken - 1) / bytesPerToken }

// inBytes is Encode in text-block mode.
func inBytes(dst []uint32, q chat.Request, why string) (Prompt, error) {
	text, err := chat.AppendText(nil, q)
	if err != nil {
		return Prompt{IDs: dst}, err
	}
	return Prompt{IDs: AppendBytes(dst, text), Mode: Bytes, Reason: why, Others: tokensOf(chat.OtherBytes(q.Prompt))}, nil
}

// AppendBytes appends text as ids of text-block mode: four bytes each, the first
// one lowest, the last one filled up with zeros.
func AppendBytes(dst []uint32, text []byte) []uint32 {
	for ; len(text) >= 4; text = text[4:] {
		dst = append(dst, binary.LittleEndian.Uint32(text))
	}
	if len(text) > 0 {
		var last [4]byte
		copy(last[:], text)
		dst = append(dst, binary.LittleEndian.Uint32(last[:]))
	}
	return dst
}

// isTokenIDs reports whether a prompt is a list whose first value is a number, a boolean
// or a list.
func isTokenIDs(prompt []byte) bool {
	prompt, isList := bytes.CutPrefix(prompt, []byte{'['})
	prompt = bytes.TrimLeft(prompt, " \t\n\r")
	return isList && len(prompt) > 0 && (strings.IndexByte("[-tf", prompt[0]) >= 0 || '0' <= prompt[0] && prompt[0] <= '9')
}

// givenIDs is Encode for a prompt of token ids. The prompt is a list of ids or a list of such lists;
// givenIDs takes the longest list and counts the ids that the engine keeps of the others.
func (m *Model) givenIDs(dst []uint32, q chat.Request) (Prompt, error) {
	p := Prompt{Mode: Exact, IDs: dst}
	cut, err := q.Cut(m.engine())
	if err != nil {
		cut = chat.Cut{} // the engine will refuse the request
	}
	r := section{b: q.Prompt}.reader()
	ids := func(dst []uint32) ([]uint32, error) {
		err := r.List(func() error {
			id, err := r.id()
			dst = append(dst, id)
			return err
		})
		return dst, err
	}
	var longest, list []uint32
	if bytes.HasPrefix(bytes.TrimLeft(q.Prompt[1:], " \t\n\r"), []byte{'['}) {
		err = r.List(func() (err error) {
			if list, err = ids(list[:0]); err != nil {
				return err
			}
			if longest == nil || len(list) > len(longest) {
				longest, list = list, longest
			}
			p.Others += len(cutTo(list, cut, [2]int{}))
			return nil
		})
	} else {
		longest, err = ids(nil)
	}
	if err == nil {
		err = r.End()
	}
	if err != nil {
		return Prompt{Mode: Exact, IDs: dst}, fmt.Errorf("tokenizer: read prompt as token ids: %w", err)
	}
	longest = cutTo(longest, cut, [2]int{})
	p.IDs, p.Exact = append(dst, longest...), len(longest)
	return p, nil
}

// cutTo returns the ids that the engine keeps of a prompt. frame are the numbers of special tokens before and behind
// the text that it keeps, too. The result may share the memory of ids.
func cutTo(ids []uint32, cut chat.Cut, frame [2]int) []uint32 {
	n := cut.Kept
	switch {
	case n <= 0 || n >= len(ids):
		return ids
	case cut.First:
		return ids[:n]
	}
	before := min(frame[0], n)
	after := min(frame[1], n-before)
	end := len(ids) - frame[1]
	out := append(ids[:before], ids[end-(n-before-after):end]...)
	return append(out, ids[len(ids)-frame[1]:len(ids)-frame[1]+after]...)
}

// engine returns the profile of the model's engine.
func (m *Model) engine() chat.Profile {
	if m == nil {
		return chat.VLLM
	}
	return m.profile
}
