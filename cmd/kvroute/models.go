// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// loadCards loads the configured models, and the model of kvroute's simulated engines. A
// model whose tokenizer is not supported is routed in text-block mode, and so are the chats
// of a model whose chat template is not supported; a warning says why. A missing file is an
// error. Models get the weights that follow from their config.json, but no attention weight if there
// is one for all.
func (c *config) loadCards(cache *tokenizer.Cache, log *slog.Logger) ([]router.Card, error) {
	cards := make([]router.Card, 0, len(c.Models)+1)
	for i := range c.Models {
		m := &c.Models[i]
		card, err := loadCard(*m, cache, log)
		if err != nil {
			return nil, fmt.Errorf("models[%d].%w", i, err)
		}
		var attention, kvRead *float64
		attention, kvRead, card.Chunk = m.weights(c.EnginePreset)
		if c.Attention == "auto" {
			card.Attention = attention
		}
		if card.KVRead = kvRead; kvRead == nil {
			log.Info("the model's config.json does not say how large keys and values are; the delay by decoding is that of the engine preset",
				"model", m.Name, "folder", m.Tokenizer, "engine_preset", c.EnginePreset)
		}
		cards = append(cards, card)
	}
	sim, err := tokenizer.LoadModel(enginesim.ModelFiles(), tokenizer.ModelConfig{Cache: cache})
	return append(cards, router.Card{Name: enginesim.ModelCard, Prompts: sim}), err
}

func loadCard(m modelConfig, cache *tokenizer.Cache, log *slog.Logger) (router.Card, error) {
	card := router.Card{Name: m.Name, Aliases: m.Aliases, LoRA: m.LoRA, BlockSize: m.BlockSize}
	conf := tokenizer.ModelConfig{
		Config: tokenizer.Config{Mode: m.TokenizerMode, Pattern: m.Pattern}, Profile: chat.Profile(m.Profile), Cache: cache,
	}
	conf.Flags = chat.Flags{
		ContentFormat: m.ChatTemplateContentFormat, ExcludeTools: m.ExcludeTools, EffortMap: m.ReasoningEffortMap,
		DisabledEffort: m.DisabledThinkingEffort,
	}
	if len(m.DefaultChatTemplateKwargs) > 0 {
		kwargs, err := json.Marshal(m.DefaultChatTemplateKwargs)
		if err != nil {
			return card, fmt.Errorf("default-chat-template-kwargs: %w", err)
		}
		conf.Flags.DefaultKwargs = kwargs
	}
	if m.ChatTemplate != "" {
		text, err := readBounded(m.ChatTemplate)
		if err != nil {
			return card, fmt.Errorf("chat-template: %w", err)
		}
		conf.ChatTemplate = string(text)
	}
	// Links out of the folder are followed: Hugging Face's cache consists of them.
	err := checkFolder(m.Tokenizer)
	if err != nil {
		return card, fmt.Errorf("tokenizer: %w", err)
	}
	card.Prompts, err = tokenizer.LoadModel(os.DirFS(m.Tokenizer), conf)
	if bad, ok := errors.AsType[*json.SyntaxError](err); ok {
		err = fmt.Errorf("%w at byte %d", err, bad.Offset)
	}
	switch {
	case errors.Is(err, tokenizer.ErrUnsupported):
		card.Why = err.Error()
		log.Warn("model is routed in text-block mode", "model", m.Name, "folder", m.Tokenizer, "err", err)
	case err != nil:
		return card, fmt.Errorf("tokenizer: %s: %w", m.Tokenizer, err)
	case card.Prompts.Degraded() != "":
		log.Warn("model is not exact, or slow, in part", "model", m.Name, "folder", m.Tokenizer, "template", m.ChatTemplate,
			"why", card.Prompts.Degraded())
	}
	return card, nil
}

// hubID is the form of a model's id at Hugging Face.
var hubID = regexp.MustCompile(`^[\w.-]+/[\w.-]+$`)

// checkFolder returns an error if a model's folder cannot be read, or is a folder of Hugging Face's cache above the
// model's files. The error says which folder to give.
func checkFolder(name string) error {
	entries, err := os.ReadDir(name)
	if errors.Is(err, fs.ErrNotExist) && hubID.MatchString(name) {
		return fmt.Errorf("there is no folder %s. If it is a model's id at Hugging Face: kvroute downloads nothing; "+
			"run `hf download %s --exclude '*.safetensors'` and give the folder that it prints", name, name)
	}
	if err != nil {
		return err
	}
	repositories := 0
	for _, e := range entries {
		switch {
		case e.Name() == "snapshots" && e.IsDir():
			example := "<revision>"
			if revisions, _ := os.ReadDir(filepath.Join(name, "snapshots")); len(revisions) > 0 {
				example = revisions[0].Name()
			}
			return fmt.Errorf("%s is a folder of Hugging Face's cache without a revision: give %s", name, filepath.Join(name, "snapshots", example))
		case strings.HasPrefix(e.Name(), "models--") && e.IsDir():
			repositories++
		}
	}
	if repositories > 0 {
		return fmt.Errorf("%s is Hugging Face's cache of several models: give the folder of one, such as %s", name,
			filepath.Join(name, "models--owner--name", "snapshots", "<revision>"))
	}
	return nil
}

// weights returns the attention weight, the cost of reading a held token and the size of a chunk by the model's
// config.json; one is nil or 0 if the file is missing or lacks a value.
func (m *modelConfig) weights(preset string) (attention, kvRead *float64, chunk int) {
	data, err := readBounded(filepath.Join(m.Tokenizer, "config.json"))
	if err != nil {
		return nil, nil, 0
	}
	a, k := weightsOf(data, preset)
	if a > 0 {
		attention = &a
	}
	if k > 0 {
		kvRead = &k
	}
	return attention, kvRead, chunkOf(data)
}

// chunkOf returns the size of a chunk of a model with chunked local attention, from its config.json; 0 if there is
// none.
func chunkOf(data []byte) int {
	var m modelShape
	if json.Unmarshal(data, &m) != nil {
		return 0
	}
	if m.Text != nil {
		m = *m.Text
	}
	return max(0, m.Chunk)
}

// readBounded reads a file of the configuration, or fails if it is larger than any file of a
// model.
func readBounded(name string) ([]byte, error) {
	return tokenizer.ReadFile(os.DirFS(filepath.Dir(name)), filepath.Base(name))
}
