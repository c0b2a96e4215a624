// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// loadCards loads the configured models, and the model of kvroute's simulated engines. A
// model whose tokenizer is not supported is routed in text-block mode, and so are the chats
// of a model whose chat template is not supported; a warning says why. A missing file is an
// error. Models get their own attention weights, unless there is one for all.
func (c *config) loadCards(cache *tokenizer.Cache, log *slog.Logger) ([]router.Card, error) {
	cards := make([]router.Card, 0, len(c.Models)+1)
	for i := range c.Models {
		m := &c.Models[i]
		card, err := loadCard(*m, cache, log)
		if err != nil {
			return nil, fmt.Errorf("models[%d].%w", i, err)
		}
		if c.Attention == "auto" {
			card.Attention = m.attention()
		}
		cards = append(cards, card)
	}
	sim, err := tokenizer.LoadModel(enginesim.ModelFiles(), tokenizer.ModelConfig{Cache: cache})
	return append(cards, router.Card{Name: enginesim.ModelCard, Prompts: sim}), err
}

func loadCard(m modelConfig, cache *tokenizer.Cache, log *slog.Logger) (router.Card, error) {
	card := router.Card{Name: m.Name, Aliases: m.Aliases, LoRA: m.LoRA, BlockSize: m.BlockSize}
	conf := tokenizer.ModelConfig{Config: tokenizer.Config{Mode: m.TokenizerMode, Pattern: m.Pattern}, Profile: chat.Profile(m.Profile), Cache: cache}
	if m.ChatTemplate != "" {
		text, err := readBounded(m.ChatTemplate)
		if err != nil {
			return card, fmt.Errorf("chat-template: %w", err)
		}
		conf.ChatTemplate = string(text)
	}
	// Links out of the folder are followed: Hugging Face's cache consists of them.
	_, err := os.ReadDir(m.Tokenizer)
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
		log.Warn("model is not exact, or slow, in part", "model", m.Name, "folder", m.Tokenizer, "template", m.ChatTemplate, "why", card.Prompts.Degraded())
	}
	return card, nil
}

// attention returns the attention weight by the model's config.json, nil if the file is missing or
// lacks a value.
func (m *modelConfig) attention() *float64 {
	data, err := readBounded(filepath.Join(m.Tokenizer, "config.json"))
	if weight, ok := attentionOf(data); err == nil && ok {
		return &weight
	}
	return nil
}

// readBounded reads a file of the configuration, or fails if it is larger than any file of a
// model.
func readBounded(name string) ([]byte, error) {
	return tokenizer.ReadFile(os.DirFS(filepath.Dir(name)), filepath.Base(name))
}
