// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/kvroute/kvroute/internal/engine"
)

// modelsPath is the path of the list of an engine's models, modelsBytes the limit of the list.
const (
	modelsPath  = "/v1/models"
	modelsBytes = 1 << 20
)

// engineModel is an element of an engine's list of models.
type engineModel struct {
	ID     string `json:"id"`
	Parent string `json:"parent"` // of an adapter: its base model
	Root   string `json:"root"`   // the model's files; equal for all names of a model
	Owner  string `json:"owned_by"`
	Length int    `json:"max_model_len"` // tokens; 0 = unknown
}

// errNoModels means that a list of models names none.
var errNoModels = errors.New("the list names no model")

// readModels reads an engine's list of models: the elements with a usable name. It ignores elements of another
// form.
func readModels(body []byte) ([]engineModel, error) {
	var list struct {
		Data []json.RawMessage `json:"data"`
	}
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, fmt.Errorf("fleet: %s is no list of models: %w", modelsPath, err)
	}
	var models []engineModel
	seen := make(map[string]bool)
	for _, element := range list.Data {
		var m engineModel
		if json.Unmarshal(element, &m) != nil || !usableName(m.ID) || seen[m.ID] {
			continue
		}
		seen[m.ID] = true
		models = append(models, m)
	}
	if len(models) == 0 {
		return nil, errNoModels
	}
	return models, nil
}

func usableName(s string) bool {
	return s != "" && len(s) <= maxNameLen && utf8.ValidString(s) && !strings.ContainsFunc(s, unicode.IsControl)
}

// listedNames returns the adapters and the other names of the model that a list of models has and a
// record does not have, at most the first 255 of the list. It
// returns none if the list does not have the record's model: then it is the list of another model.
func listedNames(models []engineModel, r *Record) (lora, aliases []string) {
	at := slices.IndexFunc(models, func(m engineModel) bool { return m.ID == r.Models[0] })
	if at < 0 {
		return nil, nil
	}
	root := models[at].Root
	for _, m := range models {
		if len(lora)+len(aliases) == maxNames-1 {
			break
		}
		switch {
		case slices.Contains(r.Models, m.ID), slices.Contains(r.LoRA, m.ID):
		case m.Parent != "":
			lora = append(lora, m.ID)
		case m.Root == "" || root == "" || m.Root == root:
			aliases = append(aliases, m.ID)
		}
	}
	slices.Sort(lora)
	slices.Sort(aliases)
	return lora, aliases
}

// notServed returns the names of a record, adapters included, that its engine does not serve. It returns none for an
// engine that takes requests with any name.
func notServed(models []engineModel, r *Record) (names []string) {
	if takesAnyName(models, r) {
		return nil
	}
	return append(unlisted(models, r.Models), missingAdapters(models, r)...)
}

// missingAdapters returns the adapters of a record that its engine does not list, if it lists adapters and the
// record's model.
func missingAdapters(models []engineModel, r *Record) []string {
	if len(models) == 0 || takesAnyName(models, r) || !listsAdapters(models, r) || len(unlisted(models, r.Models[:1])) > 0 {
		return nil
	}
	return unlisted(models, r.LoRA)
}

// unlisted returns the names that are not in an engine's list.
func unlisted(models []engineModel, wanted []string) (names []string) {
	for _, name := range wanted {
		if !slices.ContainsFunc(models, func(m engineModel) bool { return m.ID == name }) {
			names = append(names, name)
		}
	}
	return names
}

// listsAdapters says whether an engine's list of models has its adapters, too.
func listsAdapters(models []engineModel, r *Record) bool {
	return engine.Of(r.Engine).ListsAdapters || engine.Of(models[0].Owner).ListsAdapters || slices.ContainsFunc(models, func(m engineModel) bool { return m.Parent != "" })
}

// takesAnyName says whether an engine takes requests with any name.
func takesAnyName(models []engineModel, r *Record) bool {
	return engine.Of(r.Engine).AnyModel || engine.Of(models[0].Owner).AnyModel
}

// longest returns the number of tokens of the longest request that an engine takes for a record's models, as its list
// says; 0 = unknown.
func longest(models []engineModel, r *Record) (tokens int) {
	for _, m := range models {
		if slices.Contains(r.Models, m.ID) {
			tokens = max(tokens, m.Length)
		}
	}
	return tokens
}

// some joins the first names of a list, and says how many others there are.
func some(names []string) string {
	const most = 4
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d others", strings.Join(names[:most], ", "), len(names)-most)
}
