// SPDX-License-Identifier: Apache-2.0

package process

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
)

// Get fetches a URL. A status other than 200 is an error.
func Get(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s answers with status %d: %.300s", url, resp.StatusCode, body)
	}
	return body, err
}

// GetJSON fetches a URL and decodes the answer.
func GetJSON[T any](ctx context.Context, url string, into *T) error {
	body, err := Get(ctx, url)
	if err == nil {
		err = json.Unmarshal(body, into)
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", url, err)
	}
	return nil
}
