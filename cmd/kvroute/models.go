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

// loadCards loads the configured models, and that of kvroute's simulated engines.
// A model that cannot be tokenized exactly keeps its names and is routed in
// text-block mode, with a warning that says why. So are the chats of a model whose
// chat template cannot be read. A folder or file that is not there is an error.
func loadCards(models []modelConfig, cache *tokenizer.Cache, log *slog.Logger) ([]router.Card, error) {
	sim, err := tokenizer.LoadModel(enginesim.ModelFiles(), tokenizer.ModelConfig{Cache: cache})
	if err != nil {
		return nil, err
	}
	cards := make([]router.Card, 0, len(models)+1)
	for _, m := range models {
		card, err := loadCard(m, cache, log)
		if err != nil {
			return nil, fmt.Errorf("model %q: %w", m.Name, err)
		}
		cards = append(cards, card)
	}
	return append(cards, router.Card{Name: enginesim.ModelCard, Prompts: sim}), nil
}

func loadCard(m modelConfig, cache *tokenizer.Cache, log *slog.Logger) (router.Card, error) {
	card := router.Card{Name: m.Name, Aliases: m.Aliases, LoRA: m.LoRA, BlockSize: m.BlockSize}
	conf := tokenizer.ModelConfig{Config: tokenizer.Config{Mode: m.TokenizerMode, Pattern: m.Pattern}, Profile: chat.Profile(m.Profile), Cache: cache}
	if m.ChatTemplate != "" {
		text, err := readBounded(m.ChatTemplate)
		if err != nil {
			return card, err
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
		return card, fmt.Errorf("%s: %w", m.Tokenizer, err)
	case card.Prompts.Degraded() != "":
		log.Warn("model is not exact, or slow, in part", "model", m.Name, "folder", m.Tokenizer, "template", m.ChatTemplate, "why", card.Prompts.Degraded())
	}
	return card, nil
}

// loadCards loads the models with their own attention weights, unless one is given
// for all.
func (c *config) loadCards(cache *tokenizer.Cache, log *slog.Logger) ([]router.Card, error) {
	cards, err := loadCards(c.Models, cache, log)
	if err != nil || c.Attention != "auto" {
		return cards, err
	}
	for i := range c.Models {
		if weight, ok := c.Models[i].attention(); ok {
			cards[i].Attention = &weight
		}
	}
	return cards, nil
}

// attention returns the attention weight that the model's config.json tells of. A
// file that is not there, or does not say, is no error.
func (m *modelConfig) attention() (weight float64, ok bool) {
	data, err := readBounded(filepath.Join(m.Tokenizer, "config.json"))
	if err != nil {
		return 0, false
	}
	return attentionOf(data)
}

// readBounded reads a file that is named in the configuration, if it is no larger than
// those of a model.
func readBounded(name string) ([]byte, error) {
	return tokenizer.ReadFile(os.DirFS(filepath.Dir(name)), filepath.Base(name))
}
